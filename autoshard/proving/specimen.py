"""A small real copy of a model to prove a plan on: float64, every value random, shallow and narrow where it is big."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.errors import InvalidArgument
from autoshard.passes.states import Placed
from autoshard.patterns import unfold
from autoshard.plans import Mesh, Plan, TensorPlan
from autoshard.proving.replica import Shape, replicate
from autoshard.proving.shrink import shrink
from autoshard.proving.smaller import WHOLE, Smaller
from autoshard.replace import apply, find

#: Above this many parameters a copy in float64, with its gradients twice, is no longer cheap.
MOST_PARAMETERS = 20_000_000
#: Above this many it does not fit a common machine's memory: the copies take about 50 bytes for each.
TOO_MANY_PARAMETERS = 1_000_000_000


@dataclass(frozen=True)
class Specimen:
    """What is run.

    Attributes:
        model: float64 on CPU, in eval mode, every value random.
        smaller: in what it is smaller than the user's model.
    """

    model: nn.Module
    smaller: Smaller = WHOLE

    @property
    def shrunk(self) -> tuple[str, ...]:
        """What is smaller than in the user's model, one sentence each."""
        return self.smaller.notes


def make_specimen(
    model: nn.Module, tp: int, placed: Callable[[], Placed], seed: int = 0, given: Any = None
) -> Specimen:
    """Copy ``model`` as a specimen to be cut over ``tp`` ranks; the model is left as it is.

    Args:
        model: on any device, meta included.
        tp: number of tensor-parallel ranks.
        placed: gives the analysis of the model at this degree: what may be narrowed. Asked only if the model is big.
        seed: of the values.
        given: example inputs that the specimen must take as they are, or None.

    Raises:
        TraceError: the model cannot be copied.
        InvalidArgument: it is too big, and its code follows no smaller sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    smaller = shrink(model, tp, placed(), given) if _is_big(model) else WHOLE
    _check_size(model, smaller)
    fill, fill_buffer = partial(_fill, generator=generator), partial(_fill_buffer, generator=generator)
    small = replicate(model, fill, fill_buffer, smaller.shapes, smaller.dropped).eval()
    replaced = find(small) if smaller.shapes else ()
    if replaced:
        # torch's own code checks sizes that are narrower here
        apply(small, replaced)
        smaller = replace(smaller, notes=(*smaller.notes, f"{len(replaced)} modules of torch run their replacement"))
    return Specimen(small, smaller)


def fit(plan: Plan, specimen: Specimen) -> Plan:
    """Return the tensor-parallel half of a plan, with the specimen's shapes and without what that lacks."""
    return _fit(_tensor_parallel_half(plan), specimen)


def _is_big(model: nn.Module) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    return any(t.is_meta for t in tensors) or sum(t.numel() for t in tensors) > MOST_PARAMETERS


def _check_size(model: nn.Module, smaller: Smaller) -> None:
    names = dict(model.named_parameters())
    shapes = {name: smaller.shapes.get(name, tuple(p.shape)) for name, p in names.items()}
    dropped = [id(p) for name in smaller.dropped for p in model.get_submodule(name).parameters()]
    total = sum(math.prod(shape) for name, shape in shapes.items() if id(names[name]) not in dropped)
    if total > TOO_MANY_PARAMETERS:
        raise InvalidArgument(
            f"the model is too big to be run, and its code follows no smaller sizes: {total:,} parameters",
            got=f"{total:,}; allowed: {TOO_MANY_PARAMETERS:,}",
            help="verify a model of the same code with smaller sizes",
        )


def _fill(tensor: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    """Return the tensor's own values, perturbed, or random ones where it has none (of this shape)."""
    if not tensor.dtype.is_floating_point:
        return _fill_buffer(tensor, shape, generator)
    noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    if tensor.is_meta or shape != tuple(tensor.shape):
        return noise / math.sqrt(math.prod(shape[1:]) or 1) if len(shape) > 1 else 1 + 0.1 * noise
    value = tensor.detach().to("cpu", torch.float64)
    scale = float(value.std()) if value.numel() > 1 else 1.0
    return value + 0.1 * noise * (scale or 1.0)


def _fill_buffer(tensor: Tensor, shape: Shape, generator: torch.Generator) -> Tensor:
    """Return the tensor's own values: code may rely on those of a buffer."""
    real = not tensor.is_meta and shape == tuple(tensor.shape)
    if tensor.dtype.is_floating_point:
        return tensor.detach().to("cpu", torch.float64).clone() if real else _fill(tensor, shape, generator)
    return tensor.detach().cpu().clone() if real else torch.zeros(shape, dtype=tensor.dtype)


def _tensor_parallel_half(plan: Plan) -> Plan:
    def half(tensors: Mapping[str, TensorPlan]) -> dict[str, TensorPlan]:
        return {fqn: replace(t, fsdp_dim=None, dtype=_double(t.dtype)) for fqn, t in tensors.items()}

    mesh = Mesh(1, 1, plan.mesh.tp)
    return replace(plan, mesh=mesh, parameters=half(plan.parameters), buffers=half(plan.buffers))


def _double(dtype: str) -> str:
    return "float64" if dtype in ("float32", "bfloat16", "float16") else dtype


def _fit(plan: Plan, specimen: Specimen) -> Plan:
    """Return the plan with the shapes of a smaller model, and without what that lacks."""
    model = specimen.model
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}

    def fit(tensors: Mapping[str, TensorPlan]) -> dict[str, TensorPlan]:
        found = {}
        for fqn, tensor in tensors.items():
            if fqn in named:
                shape = tuple(named[fqn].shape)
                local = list(shape)
                if tensor.tp_dim is not None:
                    local[tensor.tp_dim] //= plan.mesh.tp
                found[fqn] = replace(
                    tensor,
                    shape=shape,
                    local_shape=tuple(local),
                    tp_parts=_pieces(specimen, fqn, tensor, tensor.tp_dim, tensor.tp_parts),
                    slices=_pieces(specimen, fqn, tensor, tensor.slice_dim, tensor.slices),
                )
        return found

    kept = {fqn: module for fqn, module in plan.module_plans() if fqn in modules}
    units = tuple(replace(unit, module=name) for unit in plan.units for name in unfold(unit.module) if name in modules)
    replacements = tuple(
        replace(one, fqn=name) for one in plan.replacements for name in unfold(one.fqn) if name in modules
    )
    return replace(
        plan,
        parameters=fit(plan.parameters),
        buffers=fit(plan.buffers),
        modules=kept,
        units=units,
        replacements=replacements,
    )


def _pieces(specimen: Specimen, fqn: str, tensor: TensorPlan, dim: int | None, pieces: Any) -> Any:
    """Return ``(offset, length, ...)`` pieces of a dim where they lie in the specimen's tensor.

    Raises:
        InvalidArgument: a piece begins or ends inside an extent that is narrower there.
    """
    every = specimen.smaller.bounds.get(tensor.tied_to or fqn)
    if every is None or dim is None or pieces is None:
        return pieces
    found = []
    for offset, length, *more in pieces:
        if offset not in every[dim] or offset + length not in every[dim]:
            raise InvalidArgument(
                f"a piece of {fqn} does not end where a part of it does: it cannot be made smaller to be verified",
                at=fqn,
                got=f"rows {offset} to {offset + length}; parts end at {', '.join(map(str, sorted(every[dim])[:8]))}",
                help="give a model that is not on the meta device, with smaller sizes",
            )
        start = every[dim][offset]
        found.append((start, every[dim][offset + length] - start, *more))
    return tuple(found)
