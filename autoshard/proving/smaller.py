"""A smaller variant of a model, and whether the model's own code follows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from autoshard.errors import AutoshardError
from autoshard.inputs import ExampleInputs
from autoshard.ir import Meta, Op, Traced
from autoshard.passes.factorise import Factored
from autoshard.passes.factors import Factor, find, narrowed, product
from autoshard.passes.trace import Trace
from autoshard.proving.replica import Shape, below, replicate


@dataclass(frozen=True)
class Smaller:
    """What of a model is smaller.

    Attributes:
        shapes: in elements, by first name of parameter or buffer, where they differ.
        dropped: names of the modules that are left out.
        notes: one sentence for each thing that is smaller.
        sizes: the extents that are narrowed.
        bounds: for each dim of a tensor in ``shapes``, where each part of it begins or ends, and where it does here.
    """

    shapes: Mapping[str, Shape] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    sizes: Mapping[Factor, int] = field(default_factory=dict)
    bounds: Mapping[str, Sequence[Mapping[int, int]]] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is smaller."""
        return not self.shapes and not self.dropped


#: Nothing is smaller.
WHOLE = Smaller()


def bounds(factor: Factor, sizes: Mapping[Factor, int]) -> dict[int, int]:
    """Return where the parts of an extent begin and end, as ``{offset: offset when the leaves have those sizes}``."""
    factor = find(factor)
    if factor.kind == "leaf":
        return {0: 0, factor.size: sizes.get(factor, factor.size)}
    children = list(factor.children)
    if factor.kind == "product":
        major = find(children[0])
        if major.kind != "leaf" or major in sizes:  # how often the inner parts repeat changes
            return {0: 0, factor.size: narrowed(factor, sizes)}
        inner = children[1] if len(children) == 2 else product(children[1:])
        children = [inner] * major.size
    found = {0: 0}
    old = new = 0
    for child in children:
        inside = bounds(child, sizes)
        found.update({old + a: new + b for a, b in inside.items()})
        old, new = old + find(child).size, new + narrowed(child, sizes)
    return found


def follows(model: nn.Module, factored: Factored, smaller: Smaller, given: Any) -> bool:
    """Whether the smaller model's forward runs the same ops, every extent as expected."""
    try:
        small = replicate(model, _meta, _meta, smaller.shapes, smaller.dropped)
        got = Trace(given).run(small)
    except AutoshardError:
        return False
    around = {name for block in smaller.dropped for name in _ancestors(block)}
    wants, gots = _by_module(factored.traced, smaller.dropped), _by_module(got, ())
    for module in wants.keys() | gots.keys():
        wanted = [(op.target, _shapes(factored, op, smaller.sizes)) for op in wants.get(module, ())]
        found = [(op.target, tuple(m.shape if m else None for m in _metas(op))) for op in gots.get(module, ())]
        if not (_within(found, wanted) if module in around else found == wanted):
            return False
    return True


def narrow_inputs(factored: Factored, inputs: ExampleInputs, sizes: Mapping[Factor, int]) -> Any:
    """Return inputs for a smaller model, so that none have to be searched; None where they are not the traced ones."""
    flat, tree = tree_flatten((inputs.args, inputs.kwargs))
    places = [n for n, leaf in enumerate(flat) if isinstance(leaf, Tensor)]
    sources = [s for s in factored.traced.sources if s.kind == "input" and s.meta is not None]
    if [tuple(flat[n].shape) for n in places] != [s.meta.shape for s in sources if s.meta is not None]:
        return None
    for n, source in zip(places, sources, strict=True):
        shape = [narrowed(dim, sizes) for dim in factored.single(source.name)]
        flat[n] = torch.empty(shape, dtype=flat[n].dtype, device="meta")
    return tree_unflatten(flat, tree)


def _meta(tensor: Tensor, shape: Shape) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def _ancestors(fqn: str) -> list[str]:
    steps = fqn.split(".")
    return [".".join(steps[:depth]) for depth in range(len(steps))]


def _by_module(traced: Traced, dropped: frozenset[str] | tuple[()]) -> dict[str, list[Op]]:
    found: dict[str, list[Op]] = defaultdict(list)
    for op in traced.ops:
        if not below(op.module, dropped):
            found[op.module].append(op)
    return found


def _within(found: list[Any], wanted: list[Any]) -> bool:
    """Whether ``found`` is ``wanted`` with some items left out: a loop over blocks runs fewer times."""
    rest = iter(wanted)
    return all(any(item == other for other in rest) for item in found)


def _shapes(factored: Factored, op: Op, sizes: Mapping[Factor, int]) -> tuple[Shape | None, ...]:
    dims = factored.tensors(op.name)
    return tuple(
        None if meta is None else tuple(narrowed(d, sizes) for d in dims[n]) if n < len(dims) else meta.shape
        for n, meta in enumerate(_metas(op))
    )


def _metas(op: Op) -> list[Meta | None]:
    return list(op.result) if isinstance(op.result, tuple) else [op.result]
