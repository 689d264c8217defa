"""Bytes of tensor storage that are alive, and the most that were, looked at after every operation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside the block every storage that an operation makes is known, shared storage once; meta has none.

    What a kernel allocates and frees inside one operation is not seen.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        for tensor in tensors:
            self._see(tensor)
        self.peak = self.now

    @property
    def now(self) -> int:
        """Bytes alive."""
        return sum(storage.nbytes() for storage in list(self._storages.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it asks again with the local parts
        answer = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(answer):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        self.peak = max(self.peak, self.now)
        return answer

    def _see(self, tensor: Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if type(local) in (Tensor, torch.nn.Parameter) and not local.is_meta:
            storage = local.untyped_storage()
            self._storages[storage._cdata] = storage
