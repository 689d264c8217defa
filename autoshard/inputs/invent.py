"""Made-up answers where fake tensors have no values, so that a forward runs to its end whichever branch it takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoshard._torch import NO_VALUES, TorchDispatchMode

# how many values may be invented in one forward: a loop that waits for a value would never end
_MOST = 1_000


class ValueInventor(TorchDispatchMode):
    """Answers what fake tensors cannot: numbers read from a tensor, and results whose shape depends on values.

    As many elements are found as there are. Enter it inside the fake mode.

    Args:
        number: what every number read from a tensor is; a boolean is its truth.
    """

    def __init__(self, number: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._number = number
        self._used: dict[str, int] = {}

    def invented(self) -> tuple[str, ...]:
        """Return the operators that were answered, such as ``aten.nonzero``, in the order of their first use."""
        return tuple(self._used)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator under the fake mode below; invent its result where that cannot be known."""
        name = str(func.overloadpacket)
        if name == "aten._grouped_mm":
            # its fake kernel refuses on a CPU what the CPU itself computes: other dtypes than bfloat16
            return _grouped_mm(*args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except NO_VALUES:
            self._used[name] = self._used.get(name, 0) + 1
            if self._used[name] > _MOST:
                raise
            if name == "aten.equal":
                return bool(self._number)
            if name == "aten._local_scalar_dense":
                return _number(args[0], self._number)
            answer = _ANSWERS.get(name)
            if answer is None:
                raise
            return answer(func, *args, **(kwargs or {}))


def _grouped_mm(first: Tensor, second: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return rows (n, k) of groups times (groups, k, m): (n, m); batches and ragged results alike."""
    if first.shape[-1] != second.shape[-2]:
        raise RuntimeError(f"grouped matmul of {list(first.shape)} and {list(second.shape)}: inner sizes differ")
    groups = kwargs["offs"].shape[0] if kwargs.get("offs") is not None else args[0].shape[0] if args else 0
    lead = (groups,) if first.ndim == second.ndim == 2 else (first.shape[0],) if first.ndim == 3 == second.ndim else ()
    return first.new_empty((*lead, first.shape[-2], second.shape[-1]), dtype=kwargs.get("out_dtype") or first.dtype)


def _number(tensor: Tensor, number: int) -> bool | int | float:
    if tensor.dtype is torch.bool:
        return bool(number)
    return float(number) if tensor.dtype.is_floating_point else number


def _long(tensor: Tensor, *sizes: int) -> Tensor:
    return tensor.new_empty(sizes, dtype=torch.int64)


def _unique(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tensor.reshape(-1).clone(), _long(tensor, *tensor.shape), _long(tensor, tensor.numel())


def _alike(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Find one value: whether all are alike is what is asked with it."""
    return tensor.reshape(-1)[:1].clone(), _long(tensor, *tensor.shape), _long(tensor, 1)


def _unique_dim(func: Any, tensor: Tensor, dim: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tensor.clone(), _long(tensor, tensor.shape[dim]), _long(tensor, tensor.shape[dim])


def _index(func: Any, tensor: Tensor, indices: list[Tensor | None]) -> Any:
    """Pick as many elements as a boolean mask has."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += [_long(index, index.numel()) for _ in range(index.ndim)]
        else:
            found.append(index)
    return func(tensor, found)


_ANSWERS: dict[str, Any] = {
    "aten.nonzero": lambda func, tensor: _long(tensor, tensor.numel(), tensor.ndim),
    "aten.masked_select": lambda func, tensor, mask: tensor.new_empty((mask.numel(),)),
    "aten._unique2": _unique,
    "aten.unique_consecutive": _alike,
    "aten.unique_dim": _unique_dim,
    "aten.repeat_interleave": lambda func, repeats, **kwargs: _long(repeats, repeats.numel()),
    "aten.bincount": lambda func, tensor, weights=None, minlength=0: _long(tensor, max(minlength, 1)),
    "aten.index": _index,
}
