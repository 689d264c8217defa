"""Optimizer state, cut the way the new parameter is cut.

Every rank holds the full state of an optimizer that was made before sharding, so cutting it needs no communication:
each rank keeps its own piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from autoshard._torch import local_part, spec_of, wrap
from autoshard.errors import OptimizerError
from autoshard.executor.inparts import InParts, cut_in_parts, mark

Cut = Callable[[str, Tensor, Tensor], Tensor]
"""``cut(fqn, full, parameter)`` gives ``full`` (the shape the parameter had) in the form of the new ``parameter``.

It must cut ``full`` exactly as the parameter called ``fqn`` was cut, without communication.
"""

# what torch's own optimizers keep one number of: consulted only where shapes cannot tell
_ONE_NUMBER = frozenset({"step", "eta", "mu", "mu_product"})


def cut_like(fqn: str, full: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's piece of ``full``, placed as ``parameter`` is. The default ``Cut``.

    Args:
        fqn: name of the parameter, for the error.
        full: plain tensor of the parameter's global shape, equal on all ranks.
        parameter: the new parameter: a DTensor of any placements, even or uneven, or a plain tensor.

    Returns:
        A DTensor with the mesh and placements of ``parameter``, or a plain tensor; on the device of ``parameter``.

    Raises:
        OptimizerError: the parameter has another global shape.
    """
    if full.shape != parameter.shape:
        raise OptimizerError(
            "the optimizer state does not fit the new parameter",
            at=fqn,
            got=f"state of shape {tuple(full.shape)}, parameter of shape {tuple(parameter.shape)}",
            help="make the optimizer after the model is parallelized",
        )
    # a parameter without storage says nothing about where its state belongs
    device = full.device if parameter.is_meta else parameter.device
    if not isinstance(parameter, DTensor):
        return full.to(device)
    if isinstance(parameter, InParts):
        piece: DTensor = cut_in_parts(full.detach(), parameter)
    else:
        piece = distribute_tensor(
            full.detach().contiguous(), parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    if piece.device == device:
        return piece
    # parameters kept on the host: the mesh's device is not theirs
    moved = wrap(local_part(piece).to(device), spec_of(piece))
    return mark(moved, parameter.order) if isinstance(parameter, InParts) else moved


def elementwise_keys(states: Iterable[tuple[torch.Size, Mapping[Any, Any]]]) -> frozenset[Any] | None:
    """Return the keys whose tensors have one number for each element of their parameter.

    Only parameters with at least one dim are evidence: beside a 0-dim parameter, a step count and a moment have the
    same shape.

    Args:
        states: for each parameter its global shape and its state.

    Returns:
        The keys, or None where no parameter is evidence.
    """
    evidence = [(shape, values) for shape, values in states if len(shape) > 0]
    if not evidence:
        return None
    return frozenset(
        key
        for shape, values in evidence
        for key, value in values.items()
        if isinstance(value, Tensor) and value.shape == shape
    )


@dataclass(frozen=True, eq=False)
class StateMove:
    """How the state of one parameter moves to the parameter that replaced it.

    Attributes:
        fqn: name of the parameter.
        shape: global shape of the old parameter, in elements.
        dtype: dtype of the old parameter.
        parameter: the new parameter.
        step_follows: whether the step count lives on the parameter's device (fused or capturable groups).
        elementwise: what ``elementwise_keys`` said.
        cut: how a tensor of ``shape`` is cut.
    """

    fqn: str
    shape: torch.Size
    dtype: torch.dtype
    parameter: Tensor
    step_follows: bool
    elementwise: frozenset[Any] | None
    cut: Cut

    def __call__(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """Return the new state; ``values`` is emptied on the way, so that one full tensor at a time is spare.

        Raises:
            OptimizerError: the state does not fit the new parameter.
        """
        moved: dict[Any, Any] = {}
        for key in list(values):
            moved[key] = self._value(key, values.pop(key))
        return moved

    def _value(self, key: Any, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, DTensor):
            return value
        if self._is_elementwise(key, value):
            # cut first: only a rank's part changes its dtype
            return self._follow_dtype(self.cut(self.fqn, value, self.parameter))
        # as torch's own load_state_dict: a step count is read on the host unless the kernel reads it on the device
        if self.parameter.is_meta or (key == "step" and not self.step_follows):
            return value
        return value.to(self.parameter.device)

    def _is_elementwise(self, key: Any, value: Tensor) -> bool:
        if value.shape != self.shape:
            return False
        if len(self.shape) > 0:
            return True
        return key in self.elementwise if self.elementwise is not None else key not in _ONE_NUMBER

    def _follow_dtype(self, value: Tensor) -> Tensor:
        """Follow a change of the parameter's dtype, but leave state that was kept in another dtype."""
        return value.to(self.parameter.dtype) if value.dtype == self.dtype else value
