"""Hold the factor analysis against arithmetic: run every op of a traced forward on slices and compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.ir import Meta, Op, Ref, Traced
from autoshard.passes.factorise import Factored, Factorise
from autoshard.passes.factors import Factor, count, cut_parts, leaves
from autoshard.passes.trace import Trace

_SIZED = {
    "view": "size", "reshape": "shape", "_unsafe_view": "size", "expand": "size", "new_zeros": "size", "zeros": "size",
    "ones": "size", "new_ones": "size", "full": "size",
}  # fmt: skip


class Call(nn.Module):
    """A forward made of a plain function; tensors after the first are parameters."""

    def __init__(self, function: Callable[..., Any], weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(nn.Parameter(w) for w in weights)

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args, *self.weights)


@dataclass(frozen=True)
class Ran:
    """A traced forward and the value of everything in it, in float64."""

    traced: Traced
    values: dict[str, Any]


def run(model: nn.Module, inputs: tuple[Any, ...]) -> Ran:
    """Trace ``model``'s forward and compute it."""
    traced = Trace(given=inputs).run(model)
    values = _sources(model, traced, inputs)
    for op in traced.ops:
        values[op.name] = _run(op, values)
    return Ran(traced, values)


def check(ran: Ran, degree: int = 2) -> int:
    """Check every op for every factor that is free to be cut; return the number of checks."""
    factored = Factorise().run(ran.traced)
    checks = 0
    for leaf in _free(factored, degree):
        cut = frozenset([leaf])
        if _twice(factored, cut):
            continue  # no plan cuts such a factor
        for op in ran.traced.ops:
            if op.target != "getitem" and _touches(factored, op, cut):
                _check_op(factored, op, cut, ran.values, degree)
                checks += 1
    return checks


def free_sizes(model: nn.Module, inputs: tuple[Any, ...]) -> list[int]:
    """Return the extents of parameter factors that no op blocks."""
    factored = Factorise().run(Trace(given=inputs).run(model))
    held = {f: None for p in factored.traced.parameters if p.value for d in factored.single(p.value) for f in leaves(d)}
    return [f.size for f in held if not f.blocks and f.size > 1]


def _free(factored: Factored, degree: int) -> list[Factor]:
    found: dict[Factor, None] = {}
    for value in factored.dims:
        for dims in factored.tensors(value):
            for dim in dims:
                for leaf in leaves(dim):
                    if leaf.size > 1 and leaf.size % degree == 0 and not leaf.blocks:
                        found[leaf] = None
    return list(found)


def _twice(factored: Factored, cut: frozenset[Factor]) -> bool:
    """Whether one tensor would be cut along two dims, or an op sum over what its result keeps."""
    tensors = [dims for value in factored.dims for dims in factored.tensors(value)]
    summed = [c.op for c in factored.contractions if count(c.factor, cut)]
    kept = [op for op in summed if any(count(d, cut) for dims in factored.tensors(op) for d in dims)]
    return bool(kept) or any(sum(count(dim, cut) for dim in dims) > 1 for dims in tensors)


def _sources(model: nn.Module, traced: Traced, inputs: tuple[Any, ...]) -> dict[str, Any]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    flat = iter([x for x in torch.utils._pytree.tree_leaves(inputs) if isinstance(x, Tensor)])
    values: dict[str, Any] = {}
    for source in traced.sources:
        if source.kind in ("parameter", "buffer"):
            values[source.name] = _double(named[source.fqn].detach())
        elif source.numbers is not None:
            values[source.name] = torch.tensor(source.numbers)
        elif source.meta is not None:
            values[source.name] = _double(next(flat))
    return values


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def _argument(value: Any, values: dict[str, Any]) -> Any:
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, tuple):
        return [_argument(item, values) for item in value]
    if isinstance(value, str) and hasattr(torch, value.removeprefix("torch.")) and value.startswith("torch."):
        dtype = getattr(torch, value.removeprefix("torch."))
        return torch.float64 if dtype in (torch.float32, torch.bfloat16) else dtype
    return torch.device("cpu") if value == "cpu" else value


def _run(op: Op, values: dict[str, Any], sizes: dict[str, Any] | None = None) -> Any:
    if op.target == "getitem":
        return values[op.arguments["0"].name][op.arguments["1"]]
    arguments = {name: _argument(value, values) for name, value in {**op.arguments, **(sizes or {})}.items()}
    if op.target == "aten._grouped_mm":  # there is none in float64
        return _grouped(*list(arguments.values())[:3])
    packet = getattr(torch.ops.aten, op.target.removeprefix("aten."))
    arguments |= {name: arguments[name].clone() for name in op.mutates}
    schema = getattr(packet, op.overload)._schema
    positional = [arguments[a.name] for a in schema.arguments if not a.kwarg_only]
    keywords = {a.name: arguments[a.name] for a in schema.arguments if a.kwarg_only}
    return getattr(packet, op.overload)(*positional, **keywords)


def _grouped(tokens: Tensor, experts: Tensor, offsets: Tensor) -> Tensor:
    runs = zip([0, *offsets.tolist()], offsets.tolist(), strict=False)
    return torch.cat([tokens[start:end] @ expert for (start, end), expert in zip(runs, experts, strict=True)])


def _touches(factored: Factored, op: Op, cut: frozenset[Factor]) -> bool:
    return any(count(d, cut) for name in [op.name, *op.refs()] for t in factored.tensors(name) for d in t)


def slice_of(tensor: Tensor, dims: Sequence[Factor], cut: frozenset[Factor], rank: int, degree: int) -> Tensor:
    """Return the part of ``tensor`` that a rank holds."""
    for i, dim in enumerate(dims):
        if count(dim, cut):
            pieces = cut_parts(dim, cut, degree)
            assert pieces is not None
            rows: list[int] = []
            for offset, length, is_cut in pieces:
                share = length // degree if is_cut else length
                start = offset + (rank * share if is_cut else 0)
                rows += range(start, start + share)
            tensor = tensor.index_select(i, torch.tensor(rows))
    return tensor


def _check_op(factored: Factored, op: Op, cut: frozenset[Factor], values: dict[str, Any], degree: int) -> None:
    kinds = [c.kind for c in factored.contractions if c.op == op.name and count(c.factor, cut)]
    outs = factored.tensors(op.name)
    kept = any(count(d, cut) for t in outs for d in t)
    whole = values[op.name]
    results = []
    for rank in range(degree):
        local = dict(values)
        for name in op.refs():
            if isinstance(values[name], Tensor):
                local[name] = slice_of(values[name], factored.single(name), cut, rank, degree)
        results.append(_run_local(factored, op, cut, local, rank, degree, bool(kinds) and not kept))
    wholes = list(whole) if isinstance(whole, (list, tuple)) else [whole]
    for number, (expected, dims) in enumerate(zip(wholes, outs, strict=False)):
        if op.target.startswith(("aten.empty", "aten.rand")):
            continue
        parts = [r[number] if isinstance(r, (list, tuple)) else r for r in results]
        if kinds and not kept:
            total = sum(parts[1:], parts[0])
            _close(total / degree if "mean" in kinds else total, expected, f"{op.target} over {kinds}")
        else:
            for rank, part in enumerate(parts):
                _close(part, slice_of(expected, dims, cut, rank, degree), f"{op.target} on rank {rank}")


def _close(got: Tensor, want: Tensor, what: str) -> None:
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)} instead of {tuple(want.shape)}"
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, msg=lambda m: f"{what}: {m}")


def _run_local(
    factored: Factored, op: Op, cut: frozenset[Factor], local: dict[str, Any], rank: int, degree: int, summed: bool
) -> Any:
    name = op.target.removeprefix("aten.")
    shape = slice_shape(factored, op, cut, degree) if isinstance(op.result, Meta) else []
    if summed and name == "embedding":
        rows = local[op.arguments["weight"].name].shape[0]
        index = local[op.arguments["indices"].name] - rank * rows
        inside = (index >= 0) & (index < rows)
        return local[op.arguments["weight"].name][index.clamp(0, rows - 1)] * inside[..., None]
    if summed and rank and isinstance(op.arguments.get("bias"), Ref):
        local = {**local, op.arguments["bias"].name: torch.zeros_like(local[op.arguments["bias"].name])}
    if summed and rank and name in ("addmm", "baddbmm", "addmv"):
        local = {**local, op.arguments["self"].name: torch.zeros_like(local[op.arguments["self"].name])}
    if name in ("flatten", "unflatten", "view_as", "reshape_as"):
        return local[op.arguments["self"].name].reshape(shape)
    if name in ("split", "split_with_sizes", "chunk", "tensor_split"):
        dim = int(op.arguments.get("dim") or 0)
        pieces = [math.prod([_local(d, cut, degree)]) for d in (t[dim] for t in factored.tensors(op.name))]
        return torch.split(local[op.arguments["self"].name], pieces, dim)
    sizes: dict[str, Any] = {}
    if name in _SIZED:
        sizes[_SIZED[name]] = tuple(shape)
    for literal in factored.literals:
        if literal.op == op.name and literal.argument in op.arguments:
            # an offset or a count: what lies before it, or what it counts, as a rank has it
            number = _local(literal.extent, cut, degree)
            if literal.argument != "indices":
                sizes[literal.argument] = number
            else:
                vector = next(ref.name for ref in op.arguments["indices"] if isinstance(ref, Ref))
                local[vector] = local[vector].index_fill(0, torch.tensor([literal.item]), number)
    if name == "repeat":
        source = local[op.arguments["self"].name]
        old = [1] * (len(shape) - source.dim()) + list(source.shape)
        sizes["repeats"] = tuple(new // size for new, size in zip(shape, old, strict=True))
    if "output_size" in op.arguments and name == "repeat_interleave":
        sizes["output_size"] = None
    return _run(op, local, sizes)


def slice_shape(factored: Factored, op: Op, cut: frozenset[Factor], degree: int) -> list[int]:
    """Return the shape a rank holds of an op's single result."""
    return [_local(d, cut, degree) for d in factored.single(op.name)]


def _local(dim: Factor, cut: frozenset[Factor], degree: int) -> int:
    pieces = cut_parts(dim, cut, degree)
    assert pieces is not None
    return sum(length // degree if is_cut else length for _, length, is_cut in pieces)
