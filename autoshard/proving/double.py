"""Everything in float64: what a model's code casts down on the way stays double, so that numbers compare exactly.

Many models normalise and route in float32. The last bits of those would differ between one process and a sum over
ranks, and hide a small error. Kernels that have no float64 form are replaced by their definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOWER = frozenset({torch.float32, torch.bfloat16, torch.float16})
_CASTS = frozenset({Tensor.float, Tensor.half, Tensor.bfloat16})
_GROUPED = frozenset({torch._grouped_mm, torch.nn.functional.grouped_mm})
_BATCH_NORMS = frozenset({torch.batch_norm, torch.nn.functional.batch_norm})


class Double(TorchFunctionMode):
    """Inside the block, every floating dtype that is asked for is float64, and so is what is made without asking."""

    def __init__(self) -> None:
        super().__init__()
        self._before: list[torch.dtype] = []

    def __enter__(self) -> Double:
        """Make float64 the default too: code may turn a float64 limit into a tensor of the default dtype."""
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Put the default back."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._before.pop())

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``function`` with float64 in place of lower dtypes."""
        if function in _CASTS:
            return args[0].double()
        kwargs = {name: _raised(value) for name, value in (kwargs or {}).items()}
        if function in _GROUPED and args[0].dtype == torch.float64:
            return grouped_mm(*args, **kwargs)
        result = function(*(_raised(value) for value in args), **kwargs)
        if function in _BATCH_NORMS and result.requires_grad:
            # torch 2.13.0 on CPU misreads the gradient of a single sample that lies channels last
            result.register_hook(Tensor.contiguous)
        return result


def _raised(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _LOWER else value


def grouped_mm(rows: Tensor, weights: Tensor, *, offs: Tensor, bias: Any = None, out_dtype: Any = None) -> Tensor:
    """Return each row times the matrix of its group; a row past the last group is zero.

    Args:
        rows: shape (rows, n); those of a group lie together.
        weights: shape (groups, n, m).
        offs: shape (groups,): where each group ends.
        bias: None; the kernel has none either.
        out_dtype: left out: the result is float64.
    """
    numbers = torch.arange(rows.shape[0], device=rows.device)
    groups = (numbers[:, None] >= offs[None, :]).sum(-1)
    past = groups >= weights.shape[0]
    products = torch.bmm(rows[:, None], weights[groups.clamp(max=weights.shape[0] - 1)])[:, 0]
    return products.masked_fill(past[:, None], 0)
