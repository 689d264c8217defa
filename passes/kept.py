"""What autograd keeps of each op for backward, found by running the op on meta tensors.

There is no table of ops: each op of the graph is run once for each kind of operands that it meets, with torch's own
``saved_tensors_hooks`` listening. What it packs is an operand, a result, or a tensor made inside. Views are followed by
their storage, so that a tensor that is kept under two names is counted once.

Attention is taken to run in a fused kernel, as it does on the devices that are planned for: it keeps query, key, value,
its result and a float32 number a row (Dao et al., arXiv:2205.14135, section 3), never the scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autoshard._torch import SAVED_OPERATORS
from autoshard.ir import Meta, Op, Ref, Traced

#: what selective checkpointing keeps the results of, by the names that the trace has for it
_DEAR = frozenset(
    {op._schema.name.partition("::")[2] for op in SAVED_OPERATORS}
    | {"linear", "matmul", "einsum", "conv1d", "conv2d", "conv3d", "scaled_dot_product_attention"}
)
_ATTENTION = "aten.scaled_dot_product_attention"


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory: shape and stride in elements, dtype, and whether it takes a gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool


@dataclass(frozen=True)
class Kept:
    """What one op keeps for backward.

    Attributes:
        operands: indices into ``op.refs()`` of operands that are kept.
        results: indices of results that are kept.
        made: shape and bytes of an element of each tensor that is made inside and kept.
        views: by index of result, the index of the operand whose storage it shares.
        layouts: of the results; None for what is no tensor.
        known: whether the op could be run; else all float operands and results are said to be kept.
        dear: whether it is a matmul or attention, of which selective checkpointing keeps the result.
    """

    operands: tuple[int, ...]
    results: tuple[int, ...]
    made: tuple[tuple[tuple[int, ...], int], ...]
    views: Mapping[int, int]
    layouts: tuple[Layout | None, ...]
    known: bool = True
    dear: bool = False

    @property
    def grad(self) -> bool:
        """Whether a gradient flows through a result."""
        return any(layout is not None and layout.grad for layout in self.layouts)


class Keeping:
    """Finds what each op of a traced graph keeps, in order.

    Attributes:
        layouts: of every value seen so far, one for each tensor it holds.
    """

    def __init__(self, traced: Traced, narrow: tuple[str, str] | None = None) -> None:
        """Start from the sources.

        Args:
            traced: the graph.
            narrow: a dtype of parameters and inputs, and the one that they are computed in instead.
        """
        self.narrow = narrow
        self.layouts: dict[str, tuple[Layout | None, ...]] = {
            s.name: (self._contiguous(s.meta, s.trainable),) for s in traced.sources
        }
        self._known: dict[Any, Kept] = {}

    def run(self, op: Op) -> Kept:
        """Return what ``op`` keeps, and remember how its results lie in memory."""
        for name in op.refs():
            self.layouts.setdefault(name, ())
        operands = [self.layouts[name] for name in op.refs()]
        key = (op.target, op.overload, op.no_grad, _pattern(op.arguments, {}), tuple(operands))
        if key not in self._known:
            self._known[key] = self._listen(op)
        kept = self._known[key]
        self.layouts[op.name] = kept.layouts
        return kept

    def skip(self, op: Op) -> None:
        """Remember how the results of ``op`` lie in memory without running it."""
        grad = self._reached(op)
        self.layouts[op.name] = tuple(self._contiguous(m, grad and m is not None and m.is_float) for m in _metas(op))

    def _reached(self, op: Op) -> bool:
        """Whether an operand takes a gradient."""
        return not op.no_grad and any(
            layout.grad for name in op.refs() for layout in self.layouts.get(name, ()) if layout is not None
        )

    def _listen(self, op: Op) -> Kept:
        try:
            return _Run(op, self.layouts).kept()
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            # no kernel for meta tensors, results that depend on values, or dtypes that this op does not mix
            grad = self._reached(op)
            layouts = tuple(self._contiguous(m, grad and m is not None and m.is_float) for m in _metas(op))
            if not grad:
                return Kept((), (), (), {}, layouts, known=False)
            held = [self.layouts[name] for name in op.refs()]
            floats = tuple(i for i, own in enumerate(held) if any(x and x.dtype.is_floating_point for x in own))
            results = tuple(i for i, layout in enumerate(layouts) if layout is not None and layout.grad)
            return Kept(floats, results, (), {}, layouts, known=False)

    def _contiguous(self, meta: Meta | None, grad: bool) -> Layout | None:
        if meta is None:
            return None
        stride, step = [], 1
        for size in reversed(meta.shape):
            stride.append(step)
            step *= max(size, 1)
        name = self.narrow[1] if self.narrow and meta.dtype == self.narrow[0] else meta.dtype
        return Layout(meta.shape, tuple(reversed(stride)), getattr(torch, name), grad)


def _metas(op: Op) -> tuple[Meta | None, ...]:
    return op.result if isinstance(op.result, tuple) else (op.result,)


class _Run:
    """One run of one op on meta tensors."""

    def __init__(self, op: Op, layouts: Mapping[str, tuple[Layout | None, ...]]) -> None:
        self.op = op
        self.values = {name: tuple(map(_tensor, layouts[name])) for name in op.refs()}
        self.made: dict[int, Tensor] = {}
        self.packed: list[Tensor] = []

    def kept(self) -> Kept:
        op = self.op
        with torch.set_grad_enabled(not op.no_grad), saved_tensors_hooks(self._pack, lambda kept: kept):
            answer = self._attention() if op.target == _ATTENTION else self._call()
        results = list(answer) if isinstance(answer, (list, tuple)) else [answer]
        operands = [_storages(self.values[name]) for name in op.refs()]
        outcome = [_storages((result,)) for result in results]
        found: set[int] = set()
        made: list[tuple[tuple[int, ...], int]] = []
        inputs, outputs = [], []
        for tensor in self.packed:
            storage = tensor.untyped_storage()._cdata
            if storage in found:
                continue
            found.add(storage)
            if owners := [i for i, own in enumerate(operands) if storage in own]:
                inputs.append(owners[0])
            elif owners := [i for i, own in enumerate(outcome) if storage in own]:
                outputs.append(owners[0])
            else:
                made.append((tuple(tensor.shape), tensor.element_size()))
        views = {
            r: i for r, own in reversed(list(enumerate(outcome))) for i, theirs in enumerate(operands) if own & theirs
        }
        layouts = tuple(_layout(result) for result in results)
        return Kept(tuple(inputs), tuple(outputs), tuple(made), views, layouts, dear=self._dear())

    def _pack(self, tensor: Tensor) -> Tensor:
        self.packed.append(tensor)
        return tensor

    def _dear(self) -> bool:
        return self.op.target.partition(".")[2] in _DEAR

    def _call(self) -> Any:
        op = self.op
        if op.target == "getitem":
            return self.values[op.arguments["0"].name][op.arguments["1"]]
        space, _, name = op.target.partition(".")
        function = getattr(getattr(getattr(torch.ops, space), name), op.overload)
        arguments = {key: self._argument(value) for key, value in op.arguments.items()}
        for key in op.mutates:
            arguments[key] = arguments[key].view_as(arguments[key])
        positional = [arguments[a.name] for a in function._schema.arguments if not a.kwarg_only]
        keywords = {a.name: arguments[a.name] for a in function._schema.arguments if a.kwarg_only}
        return function(*positional, **keywords)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, Ref):
            held = self.values[value.name]
            return held[0] if len(held) == 1 else list(held)
        if isinstance(value, tuple):
            return [self._argument(item) for item in value]
        if isinstance(value, str):
            named = getattr(torch, value.removeprefix("torch."), None) if value.startswith("torch.") else None
            if named is not None:
                return named
            return torch.device("meta") if _is_device(value) else value
        return value

    def _attention(self) -> Tensor:
        """Stand for the fused kernel: it packs its operands, its result and a number a row."""
        names = ("query", "key", "value", "attn_mask")
        given = [self._argument(self.op.arguments.get(name)) for name in names]
        query, _, value, mask = given
        *outer, rows, _ = query.shape
        # the kernels lay rows out before heads, so that joining the heads again copies nothing
        shape = (*outer[:-1], rows, *outer[-1:], value.shape[-1])
        result: Tensor = query.new_empty(shape).transpose(-3, -2) if outer else query.new_empty(shape)
        if any(isinstance(t, Tensor) and t.requires_grad for t in given) and torch.is_grad_enabled():
            result.requires_grad_()
            self.packed += [t for t in given if isinstance(t, Tensor) and t.dtype.is_floating_point]
            if isinstance(mask, Tensor) and not mask.dtype.is_floating_point:
                self.packed.append(torch.empty_like(mask, dtype=query.dtype))  # the kernels add it: it becomes float
            self.packed += [result, query.new_empty((*outer, rows), dtype=torch.float32)]
        return result


def _tensor(layout: Layout | None) -> Tensor | None:
    if layout is None:
        return None
    made = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
    if not layout.grad:
        return made
    # an alias with history: an op in place may write to it
    return made.requires_grad_().view_as(made)


def _storages(values: tuple[Any, ...]) -> frozenset[int]:
    return frozenset(v.untyped_storage()._cdata for v in values if isinstance(v, Tensor))


def _layout(value: Any) -> Layout | None:
    if not isinstance(value, Tensor):
        return None
    return Layout(tuple(value.shape), value.stride(), value.dtype, value.requires_grad)


def _is_device(text: str) -> bool:
    return text.partition(":")[0] in ("cpu", "cuda", "meta", "xpu", "mps")


def _pattern(value: Any, seen: dict[str, int]) -> Any:
    """Return arguments with the names of values replaced by numbers, hashable."""
    if isinstance(value, Ref):
        return ("ref", seen.setdefault(value.name, len(seen)))
    if isinstance(value, Mapping):
        return tuple((key, _pattern(item, seen)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_pattern(item, seen) for item in value)
    return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)
