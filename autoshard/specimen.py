"""A small real copy of a model to prove a plan on: float64, every value random, shallow and narrow where it is big.

What is narrowed are the extents that the analysis found free to be cut: the user's code is known to follow those. What
is dropped are later siblings in lists of blocks, as long as each kind of block stays twice.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from autoshard.errors import TraceError
from autoshard.passes.factors import find, leaves, narrowed
from autoshard.passes.place import Placed
from autoshard.plans import Mesh, Plan, TensorPlan, unfold

#: Above this many parameters a copy in float64, with its gradients twice, is no longer cheap.
MOST_PARAMETERS = 20_000_000
#: A table keeps at least this many rows, so that different tokens stay different.
FEWEST_ROWS = 32


@dataclass(frozen=True)
class Specimen:
    """What is run.

    Attributes:
        model: float64 on CPU, in eval mode, every value random.
        plan: the tensor-parallel half of the plan, with the specimen's shapes.
        shrunk: what is smaller than in the user's model, one sentence each.
    """

    model: nn.Module
    plan: Plan
    shrunk: tuple[str, ...]


def make_specimen(model: nn.Module, plan: Plan, placed: Placed, seed: int = 0) -> Specimen:
    """Copy ``model`` as a specimen for ``plan``; the model is left as it is.

    Args:
        model: on any device, meta included.
        plan: any plan for it.
        placed: the analysis of the model at the plan's tp degree: what may be narrowed.
        seed: of the values.

    Raises:
        TraceError: the model cannot be copied.
    """
    tensors = [*model.parameters(), *model.buffers()]
    big = any(t.is_meta for t in tensors) or sum(t.numel() for t in tensors) > MOST_PARAMETERS
    half = _tensor_parallel_half(plan)
    generator = torch.Generator().manual_seed(seed)
    if not big:
        return Specimen(_copy(model, {}, {}, generator), half, ())
    lengths = _shallow(model, placed)
    shapes, notes = _narrow(model, placed, plan.mesh.tp)
    small = _copy(model, shapes, lengths, generator)
    notes += [f"{name}: {n} of {len(list(model.get_submodule(name).children()))} blocks" for name, n in lengths.items()]
    return Specimen(small, _fit(half, small), tuple(notes))


def _tensor_parallel_half(plan: Plan) -> Plan:
    def whole(tensor: TensorPlan) -> TensorPlan:
        shape = list(tensor.shape)
        if tensor.tp_dim is not None:
            shape[tensor.tp_dim] //= plan.mesh.tp
        return replace(tensor, fsdp_dim=None, local_shape=tuple(shape), dtype=_double(tensor.dtype))

    return replace(
        plan,
        mesh=Mesh(1, 1, plan.mesh.tp),
        parameters={fqn: whole(t) for fqn, t in plan.parameters.items()},
        buffers={fqn: whole(t) for fqn, t in plan.buffers.items()},
    )


def _double(dtype: str) -> str:
    return "float64" if dtype in ("float32", "bfloat16", "float16") else dtype


def _copy(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], lengths: Mapping[str, int], generator: torch.Generator
) -> nn.Module:
    """Copy the modules around new tensors, so that no second full copy is ever made."""
    memo: dict[int, object] = {}
    for name, length in lengths.items():
        for child in list(model.get_submodule(name).children())[length:]:
            memo[id(child)] = None
    for fqn, parameter in model.named_parameters():
        if not _dropped(fqn, lengths):
            filled = _fill(parameter, shapes.get(fqn), generator)
            memo[id(parameter)] = nn.Parameter(filled, requires_grad=parameter.requires_grad)
    for fqn, buffer in model.named_buffers():
        if not _dropped(fqn, lengths):
            memo[id(buffer)] = _fill(buffer, shapes.get(fqn), generator, exact=True)
    try:
        made: nn.Module = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise TraceError("the model cannot be copied", got=f"{type(error).__name__}: {error}") from error
    for name, length in lengths.items():
        container = made.get_submodule(name)
        for key in list(container._modules)[length:]:
            del container._modules[key]
    for module in made.modules() if shapes else ():
        if getattr(module, "padding_idx", None) is not None:
            module.padding_idx = None  # type: ignore[assignment]
    return made.eval()


def _dropped(fqn: str, lengths: Mapping[str, int]) -> bool:
    for name, length in lengths.items():
        rest = fqn.removeprefix(name + ".")
        if rest != fqn and rest.split(".")[0].isdigit() and int(rest.split(".")[0]) >= length:
            return True
    return False


def _fill(tensor: Tensor, shape: tuple[int, ...] | None, generator: torch.Generator, exact: bool = False) -> Tensor:
    """Return new values: the tensor's own, perturbed, or random ones where it has none."""
    size = tuple(tensor.shape) if shape is None else shape
    if not tensor.dtype.is_floating_point:
        return torch.zeros(size, dtype=tensor.dtype) if tensor.is_meta else tensor.detach().cpu().clone()
    noise = torch.randn(size, dtype=torch.float64, generator=generator)
    if tensor.is_meta or size != tuple(tensor.shape):
        fan = math.prod(size[1:]) if len(size) > 1 else 1
        return noise / math.sqrt(fan) if len(size) > 1 else 1 + 0.1 * noise
    value = tensor.detach().to("cpu", torch.float64)
    if exact:
        return value.clone()
    scale = float(value.std()) if value.numel() > 1 else 1.0
    return value + 0.1 * noise * (scale or 1.0)


def _shallow(model: nn.Module, placed: Placed) -> dict[str, int]:
    """Return how many blocks of each list to keep: up to the second of every kind."""
    lengths: dict[str, int] = {}
    for children in placed.chosen.factored.traced.containers:
        name = children[0].rpartition(".")[0]
        seen: dict[object, list[int]] = {}
        for number, child in enumerate(children):
            module = model.get_submodule(child)
            kind = (type(module), tuple((n, tuple(p.shape)) for n, p in module.named_parameters()))
            seen.setdefault(kind, []).append(number)
        keep = max(numbers[min(1, len(numbers) - 1)] for numbers in seen.values()) + 1
        if keep < len(children) and isinstance(model.get_submodule(name), nn.ModuleList):
            lengths[name] = keep
    return lengths


def _narrow(model: nn.Module, placed: Placed, tp: int) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """Return the narrower shapes by name, and one sentence for each kind of extent."""
    factored = placed.chosen.factored
    rows = {leaf for c in factored.contractions if c.kind == "lookup" for leaf in leaves(c.factor)}
    sizes = {}
    for leaf in placed.chosen.inner | placed.chosen.gathered:
        least = max(2 * tp, FEWEST_ROWS if leaf in rows else 0)
        sizes[find(leaf)] = min(
            (d for d in range(tp, leaf.size + 1, tp) if leaf.size % d == 0 and d >= least), default=leaf.size
        )
    shapes = {}
    for tensor in (*factored.traced.parameters, *factored.traced.buffers):
        if tensor.value:
            shape = tuple(narrowed(dim, sizes) for dim in factored.single(tensor.value))
            if shape != tensor.meta.shape:
                shapes[tensor.fqn] = shape
    kinds = sorted({(leaf.size, size) for leaf, size in sizes.items() if size != leaf.size})
    return shapes, [f"an extent of {old} is {new}" for old, new in kinds]


def _fit(plan: Plan, model: nn.Module) -> Plan:
    """Return the plan with the shapes of a smaller model, and without what that lacks."""
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
                found[fqn] = replace(tensor, shape=shape, local_shape=tuple(local))
        return found

    kept = {fqn: module for fqn, module in plan.module_plans() if fqn in modules}
    units = tuple(replace(unit, module=name) for unit in plan.units for name in unfold(unit.module) if name in modules)
    return replace(plan, parameters=fit(plan.parameters), buffers=fit(plan.buffers), modules=kept, units=units)
