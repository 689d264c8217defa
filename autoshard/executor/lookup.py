"""Tables whose rows are cut over tp: each rank looks up the rows it has and gives zeros for the others.

The row numbers of a call are made local before the forward, the rows that live elsewhere are zeroed after it; the
sum over tp of the answers is the row. A number that no rank has is left out of range, so that the table's own
check still refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from autoshard.errors import InvalidArgument, PlanMismatch
from autoshard.executor.collectives import Axis
from autoshard.paths import Argument


class RowCutTable:
    """The hooks of one row-cut table.

    Args:
        module: the module that looks rows up; its ``padding_idx``, if it has one, is a global row number.
        path: the argument that holds the global row numbers, any shape, integer.
        num_rows: rows on one rank.
        axis: the tp axis.
        fqn: the module's name, for messages.
    """

    def __init__(self, module: nn.Module, path: str, num_rows: int, axis: Axis, fqn: str) -> None:
        self.numbers = Argument(module, path, fqn)
        self.num_rows = num_rows
        self.axis = axis
        self.padding: int | None = getattr(module, "padding_idx", None)
        self._elsewhere: Tensor | None = None
        self._padded: Tensor | None = None

    def install(self, module: nn.Module) -> None:
        """Register the hooks, after those of whoever calls ``zero`` and converts the answer."""
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after, always_call=True)

    def zero(self, rows: Tensor) -> Tensor:
        """Zero the rows that live on other ranks. ``rows`` has the shape of the row numbers plus trailing dims.

        The padding row keeps its value and loses its gradient, as the table itself would do for a global number.

        Raises:
            PlanMismatch: the call gave no row numbers.
        """
        if self._elsewhere is None:
            raise PlanMismatch(f"no row numbers were given: {self.numbers.at}", help="a row-cut table needs them")
        elsewhere, padded = (_over(mask, rows) for mask in (self._elsewhere, self._padded))
        assert elsewhere is not None
        if padded is not None and rows.requires_grad:
            rows = torch.where(padded, rows.detach(), rows)
        return rows.masked_fill(elsewhere, 0)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.padding is not None:
            # the table would zero the gradient of a local row of that number, on every rank
            module.padding_idx = None  # type: ignore[assignment]
        return self.numbers.update(args, kwargs, self._localise)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._elsewhere = self._padded = None
        if self.padding is not None:
            module.padding_idx = self.padding  # type: ignore[assignment]

    def _localise(self, numbers: Tensor) -> Tensor:
        local = numbers - self.axis.rank * self.num_rows
        exists = (numbers >= 0) & (numbers < self.num_rows * self.axis.size)
        self._elsewhere = exists & ((local < 0) | (local >= self.num_rows))
        self._padded = None if self.padding is None else numbers == self.padding
        return local.masked_fill(self._elsewhere, 0)


def refuse_unsupported(module: nn.Module, fqn: str) -> None:
    """Refuse options of a table that read or write more than the rows that are looked up.

    Raises:
        InvalidArgument: such an option is set.
    """
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option, None):
            raise InvalidArgument(
                f"a table with {option} cannot be cut by rows",
                at=fqn,
                got=f"{option}={getattr(module, option)!r}",
                help=f"leave {fqn} whole, or unset {option}",
            )


def _over(mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """Give ``mask`` the trailing dims of ``rows``."""
    return None if mask is None else mask.reshape(*mask.shape, *(1 for _ in range(rows.dim() - mask.dim())))
