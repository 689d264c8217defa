"""What differs between two plans: the mesh, the numbers, and every tensor and module decided otherwise.

Torch-free, like the plans it reads. Names with the same change share a row, layers are folded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from autoshard.layout import NAME_WIDTH, columns, name_cell, section
from autoshard.patterns import unfold
from autoshard.plans import ModulePlan, Plan, TensorPlan, Workload
from autoshard.words import fold_names, human_bytes

_Clauses = tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """One thing that two plans say otherwise.

    Attributes:
        topic: the section it belongs to, such as ``"parameters"``.
        name: what it is about: a parameter, a module, a number.
        first: what only the first plan says of it; ``"absent"`` where it does not have it.
        second: what only the second plan says of it.
    """

    topic: str
    name: str
    first: str
    second: str


def differences(first: Plan, second: Plan) -> list[Difference]:
    """Return what differs, the mesh first, in the order of the first plan. Reasons and times are not compared."""
    one, other = _facts(first), _facts(second)
    found = []
    for topic, facts in one.items():
        for name in dict.fromkeys([*facts, *other[topic]]):
            before, after = facts.get(name), other[topic].get(name)
            if before != after:
                found.append(Difference(topic, name, _only(before, after), _only(after, before)))
    return found


def render_differences(found: list[Difference]) -> RenderableType:
    """Return the differences as sections of rows ``name, first -> second``; a sentence where there are none."""
    if not found:
        return Text("the plans do not differ")
    topics: dict[str, dict[tuple[str, str], list[str]]] = {}
    for one in found:
        topics.setdefault(one.topic, {}).setdefault((one.first, one.second), []).append(one.name)
    return Group(*(_topic(topic, rows) for topic, rows in topics.items()))


def _topic(topic: str, rows: Mapping[tuple[str, str], list[str]]) -> RenderableType:
    """Return one section: rows of the names that share a change."""
    return section(topic, columns([(name_cell(fold_names(rows[change])), _change(*change)) for change in rows], "nl"))


def _only(clauses: _Clauses | None, others: _Clauses | None) -> str:
    """Say what ``clauses`` have over ``others``."""
    if clauses is None:
        return "absent"
    return ", ".join(clause for clause in clauses if clause not in (others or ())) or "nothing more"


def _change(first: str, second: str) -> str:
    return f"{first} -> {second}" if len(first + second) < NAME_WIDTH else f"- {first}\n+ {second}"


def _sums(workload: Workload) -> _Clauses:
    return () if workload.tp_reduced is None else (f"sums over tp in {workload.tp_reduced}",)


def _facts(plan: Plan) -> dict[str, dict[str, _Clauses]]:
    """Return every fact of a plan as topic, name and clauses, in the order to show them; a plan has every topic."""
    workload, coverage = plan.workload, plan.coverage
    return {
        "plan": {
            "model": (plan.model,),
            "mesh": (f"dp_replicate={plan.mesh.dp_replicate}", f"dp_shard={plan.mesh.dp_shard}", f"tp={plan.mesh.tp}"),
            "workload": (f"batch {workload.batch}", f"sequence {workload.sequence}", workload.dtype, *_sums(workload)),
        },
        "cut over tp": {
            "parameter bytes": (f"{coverage.parameter_bytes:.4%}",),
            "matmul FLOPs": (f"{coverage.matmul_flops:.4%}",),
        },
        "bytes per rank": {name.replace("_", " "): (_exact(size),) for name, size in plan.memory_bytes.items()},
        "collectives per step": {
            f"{one.axis} {one.op} of {one.what}": (f"{one.count} x", _exact(one.bytes)) for one in plan.collectives
        },
        "parameters": {name: tuple(_tensor(tensor)) for name, tensor in plan.parameters.items()},
        "buffers": {name: tuple(_tensor(tensor)) for name, tensor in plan.buffers.items()},
        "modules": {name: tuple(_module(name, module)) for name, module in plan.module_plans()},
        "replaced in place": {name or "(root)": (one.kind,) for one in plan.replacements for name in unfold(one.fqn)},
        "FSDP units": {name or "(root)": ("a unit",) for name in plan.unit_modules()},
    }


def _exact(size: int) -> str:
    return f"{human_bytes(size)} ({size:,} B)"


def _tensor(tensor: TensorPlan) -> Iterator[str]:
    """Say how a tensor is held and read."""
    yield f"{tensor.shape} {tensor.dtype}"
    yield "whole" if tensor.tp_dim is None else f"tp dim {tensor.tp_dim}"
    if tensor.tp_parts is not None:
        yield f"in parts {list(tensor.tp_parts)}"
    if tensor.tp_dim is not None and tensor.tp_copies > 1:
        yield f"on {tensor.tp_copies} tp ranks each"
    if tensor.fsdp_dim is not None:
        yield f"fsdp dim {tensor.fsdp_dim}"
    if tensor.grad_sum is not None:
        rows = "" if tensor.grad_sum.parts is None else f" of parts {list(tensor.grad_sum.parts)}"
        yield f"gradient{rows} summed over {tensor.grad_sum.ranks} tp ranks"
    if tensor.read != "local":
        yield f"read {tensor.read}"
    if tensor.slices is not None:
        yield f"slices of dim {tensor.slice_dim} {list(tensor.slices)}"
    yield "trained" if tensor.trainable else "frozen"
    if tensor.tied_to is not None:
        yield f"tied to {tensor.tied_to}"


def _module(fqn: str, module: ModulePlan) -> Iterator[str]:
    """Say what happens at a module's boundary."""
    yield module.style
    yield from _pairs(module.inputs, "")
    yield from _pairs(module.outputs, "out.")
    for name, share in sorted(module.share.items()):
        yield f"{name} shared as {_relative(share, fqn)}"
    if module.lookup:
        yield f"row numbers in {module.lookup}"
    for name, value in module.attributes.items():
        yield f"{name} = {value}"
    for one in module.rewrites:
        yield f"rewritten {one}"
    if module.draws:
        yield f"draws {module.draws}"
    for path, conversion in sorted(module.returns.items()):
        yield f"out.{path}: {conversion} if returned".replace("out.:", "out:")
    for key, conversion in sorted(module.sequence.items()):
        yield f"{key.rstrip(':')} {conversion or 'as it is'} while the sequence is cut"


def _pairs(pairs: Mapping[str, str], prefix: str) -> Iterator[str]:
    for name, conversion in sorted(pairs.items()):
        yield f"{(prefix + name).rstrip('.')}: {conversion}"


def _relative(name: str, fqn: str) -> str:
    """Write a dot for each leading part that ``name`` has in common with ``fqn``: so the same in every layer folds."""
    parts, common = name.split("."), 0
    for ours, theirs in zip(parts[:-1], fqn.split("."), strict=False):
        if ours != theirs:
            break
        common += 1
    return "." * common + ".".join(parts[common:])
