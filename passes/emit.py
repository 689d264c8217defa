"""Write the plan: every fact with its reason, repeated modules folded.

Reads the placed cuts, the FSDP units and the mesh. Decides nothing.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autoshard import cost
from autoshard.dtypes import dtype_bytes
from autoshard.folding import fold_refusals, fold_strings, split_number
from autoshard.ir import Tensor
from autoshard.passes.cut import Cut
from autoshard.passes.draws import Draws, find_draws
from autoshard.passes.factors import count
from autoshard.passes.occurrence import Division
from autoshard.passes.returns import find_returns
from autoshard.passes.states import Placed
from autoshard.plans import (
    Coverage,
    GradSum,
    Mesh,
    MeshChoice,
    ModulePlan,
    Plan,
    Refusal,
    Replacement,
    TensorPlan,
    Unit,
    Workload,
    fold,
    module_plan,
    unfold,
)


@dataclass(frozen=True)
class Emit:
    """Turn a placed model into a plan."""

    mesh: Mesh
    workload: Workload
    units: tuple[str, ...]
    why_mesh: str = ""
    meshes: tuple[MeshChoice, ...] = ()
    refused: tuple[Refusal, ...] = field(default=())
    replacements: tuple[Replacement, ...] = ()
    in_training: Mapping[str, int] = field(default_factory=dict)

    def run(self, placed: Placed) -> Plan:
        """Return the plan."""
        traced = placed.chosen.factored.traced
        whys = _Whys(placed)
        parameters = self._tensors(placed, traced.parameters, whys, sharded=True)
        buffers = self._tensors(placed, traced.buffers, whys, sharded=False)
        members = self.members(traced.parameters)
        sizes = cost.Sizes.of(placed, self.workload)
        untraced = [Refusal(u.fqn or "the model", u.where, u.why) for u in traced.untraced] if self.mesh.tp > 1 else []
        refused = fold_refusals([*placed.chosen.refused, *self.refused, *untraced])
        draws = find_draws(placed, self.in_training)
        modules = _modules(placed, parameters, whys, draws.modules, find_returns(placed))
        return Plan(
            mesh=self.mesh,
            parameters=parameters,
            buffers=buffers,
            modules=modules,
            units=self._units(members, parameters),
            memory_bytes=cost.memory(parameters, buffers, members, self.mesh, cost.activation_bytes(placed, sizes)),
            collectives=cost.collectives(placed, sizes, parameters, members, self.mesh),
            coverage=_coverage(placed, parameters, sizes),
            workload=self.workload,
            why_mesh=self.why_mesh,
            meshes=self.meshes,
            assumptions=_assumptions(placed),
            warnings=_warnings(placed, draws),
            refused=refused,
            replacements=_replacements(self.replacements, modules),
            model=traced.model,
        )

    def _tensors(self, placed: Placed, tensors: Iterable[Tensor], whys: _Whys, sharded: bool) -> dict[str, TensorPlan]:
        found: dict[str, TensorPlan] = {}
        for tensor in tensors:
            division, why = whys.of(tensor)
            held = None if division is None or division.mixed else division
            shape = list(tensor.meta.shape)
            if held is not None:
                shape[held.dim] //= self.mesh.tp
            shard = 0 if sharded and self.mesh.dp_shard > 1 and shape else None
            if shard is not None:
                shape[0] = -(-shape[0] // self.mesh.dp_shard)
            mixed = division is not None and division.mixed
            summed = sharded and tensor.trainable and (mixed or tensor.fqn in placed.grad_sums)
            for name in tensor.names:
                found[name] = TensorPlan(
                    shape=tensor.meta.shape,
                    dtype=tensor.meta.dtype,
                    tp_dim=held.dim if held else None,
                    tp_parts=None if held is None or held.even else tuple((o, n) for o, n, _ in held.pieces),
                    tp_copies=1 if held else self.mesh.tp,
                    grad_sum=GradSum(self.mesh.tp) if summed else None,
                    fsdp_dim=shard,
                    local_shape=tuple(shape),
                    why=why,
                    read=_read(placed, tensor.fqn, mixed),
                    trainable=tensor.trainable,
                    tied_to=None if name == tensor.fqn else tensor.fqn,
                    **(_slices(division) if division is not None and mixed else {}),
                )
        return found

    def members(self, parameters: Iterable[Tensor]) -> list[tuple[str, ...]]:
        """Return the first names of each unit's parameters, the root's last."""
        found: dict[str, list[str]] = {unit: [] for unit in self.units}
        for tensor in parameters:
            home = tensor.fqn.rpartition(".")[0]
            while home and home not in found:
                home = home.rpartition(".")[0]
            found[home if home in found else ""].append(tensor.fqn)
        return [tuple(found[unit]) for unit in self.units]

    def _units(self, members: list[tuple[str, ...]], parameters: Mapping[str, TensorPlan]) -> tuple[Unit, ...]:
        rows = []
        for unit, fqns in zip(self.units, members, strict=True):
            size = sum(cost.gathered_bytes(parameters[fqn], self.mesh) for fqn in fqns)
            rows.append((unit, len(fqns), size))
        grouped: dict[tuple[str, str, int, int], list[int]] = {}
        for unit, number, size in rows:
            prefix, index, suffix = split_number(unit)
            grouped.setdefault((prefix, suffix, number, size), []).append(-1 if index is None else index)
        found = []
        for (prefix, suffix, number, size), indices in grouped.items():
            name = prefix + (fold(indices) if indices != [-1] else "") + suffix
            found.append(Unit(name, number, size))
        return tuple(found)


def _read(placed: Placed, fqn: str, mixed: bool) -> str:
    if mixed:
        return "slice"
    return "first_rank" if fqn in placed.first_rank else "local"


def _slices(division: Division) -> dict[str, Any]:
    """Return what each rank reads of a parameter only some parts of which are cut."""
    return {
        "slice_dim": division.dim,
        "slices": tuple((offset, length, max(ways, 1)) for offset, length, ways in division.pieces),
    }


_WHY_DRAWN = {
    "per_rank": "random numbers for each rank's share are the rank's own",
    "shared": "random numbers for whole values are the same on every rank",
}
_WHY_RETURNED = "it returns a rank's share that nobody here takes"


class _Whys:
    """The dim a tensor is cut along, and why."""

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        self.cut_of: dict[str, Cut] = {fqn: cut for cut in reversed(placed.chosen.cuts) for fqn in cut.divisions}
        traced = placed.chosen.factored.traced
        self.summed: set[str] = set()  # parameters on the side that sums over the cut
        self.looked_up: set[str] = set()
        fqn_of = {s.name: s.fqn for s in traced.sources if s.kind == "parameter"}
        ops = {op.name: op for op in traced.ops}
        for item in placed.chosen.factored.contractions:
            rows = item.kind == "lookup" and any(placed.chosen.gathered_dim(n) == 0 for n in ops[item.op].refs())
            if rows or count(item.factor, placed.chosen.inner):
                for name in ops[item.op].refs():
                    if name in fqn_of and fqn_of[name] in self.cut_of:
                        (self.looked_up if item.kind == "lookup" else self.summed).add(fqn_of[name])
        self.summed -= placed.first_rank

    def of(self, tensor: Tensor) -> tuple[Division | None, str]:
        """Return how a tensor is divided, and why or why not."""
        cut = self.cut_of.get(tensor.fqn)
        if cut is not None:
            return self.placed.chosen.divisions[tensor.fqn], self._cut(tensor.fqn, cut)
        if tensor.fqn in self.placed.grad_sums:
            return None, self.placed.grad_sums[tensor.fqn]
        if tensor.fqn in self.placed.first_rank:
            return None, "a bias added to a partial sum: it counts once, on the first tp rank"
        if self.placed.chosen.degree == 1:
            return None, "there is one tp rank"
        if tensor.value is None:
            return None, "the traced forward does not use it"
        return None, self.placed.chosen.whys.get(tensor.fqn, "no extent of it can be cut alone")

    def _cut(self, fqn: str, cut: Cut) -> str:
        others = [f for f in cut.divisions if f != fqn]
        if self.placed.chosen.divisions[fqn].mixed:
            return "held whole, as every rank needs some of it; each reads its share of the rest"
        if fqn in self.looked_up:
            return "rows are looked up where they live; the parts are summed"
        if cut.gathered:
            why = self.placed.chosen.whys.get(fqn)
            return f"its output is cut, then gathered: {why}" if why else "its output is cut, then gathered"
        if fqn in self.summed:
            return "sums over what " + _short(o for o in others if o not in self.summed) + " cut"
        return "its output is cut as far as " + _short(o for o in others if o in self.summed) + " sums over it"


def _short(fqns: Iterable[str]) -> str:
    """Write names by their last two pieces, each once."""
    names = dict.fromkeys(fqn.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2] for fqn in fqns)
    return ", ".join(names) or "nothing"


def _modules(
    placed: Placed,
    parameters: Mapping[str, TensorPlan],
    whys: _Whys,
    draws: Mapping[str, str],
    returns: Mapping[str, Mapping[str, str]],
) -> dict[str, ModulePlan]:
    """Return the plan of each module with something to do, folded over the first number in its name."""
    inputs: dict[str, dict[str, str]] = defaultdict(dict)
    outputs: dict[str, dict[str, str]] = defaultdict(dict)
    shares: dict[str, dict[str, str]] = defaultdict(dict)
    order: dict[str, None] = {}
    for fqn, tensor in parameters.items():
        if tensor.tp_dim is not None or tensor.grad_sum:
            order[fqn.rpartition(".")[0]] = None
    for c in placed.conversions:
        order[c.fqn] = None
        if c.side == "inside":  # it is in the rewrites
            continue
        (inputs if c.side == "inputs" else outputs)[c.fqn][c.path] = c.kind
        if c.share:
            shares[c.fqn][c.path] = c.share
    settings: dict[str, dict[str, int]] = defaultdict(dict)
    for (fqn, name), value in placed.settings.items():
        order[fqn] = None
        settings[fqn][name] = value
    for fqn in (*placed.rewrites, *draws, *returns):
        order[fqn] = None
    homes: dict[str, dict[str, TensorPlan]] = defaultdict(dict)
    for fqn, tensor in parameters.items():
        homes[fqn.rpartition(".")[0]][fqn] = tensor
    first_call: dict[str, int] = {}
    for call in placed.chosen.factored.traced.calls:
        first_call.setdefault(call.fqn, call.id)
    plans: dict[str, ModulePlan] = {}
    for fqn in sorted(order, key=lambda f: first_call.get(f, len(first_call))):
        style, why = _style(placed, fqn, homes[fqn], inputs[fqn], outputs[fqn], whys)
        lookup = placed.lookups.get(fqn)
        rewrites = placed.rewrites.get(fqn, ())
        if style == "replicate" and not why:
            style, why = "resize", "sizes in its code follow the cut"
            if not settings[fqn] and not rewrites:
                style, why = "region", _WHY_DRAWN.get(draws.get(fqn, ""), _WHY_RETURNED)
        plans[fqn] = ModulePlan(
            style,
            inputs[fqn],
            outputs[fqn],
            why,
            shares[fqn],
            lookup,
            settings[fqn],
            rewrites,
            draws.get(fqn),
            returns.get(fqn, {}),
        )
    return _folded(plans)


def _replacements(found: Iterable[Replacement], modules: Mapping[str, ModulePlan]) -> tuple[Replacement, ...]:
    """Return the replacements of modules in which something happens, folded: the others keep torch's own code."""
    busy = {
        ".".join(steps[:n])
        for p in modules
        for f in unfold(p)
        for steps in [f.split(".")]
        for n in range(len(steps) + 1)
    }
    folded = fold_strings({one.fqn: f"{one.kind}|{one.why}" for one in found if one.fqn in busy})
    return tuple(Replacement(fqn, *text.split("|", 1)) for fqn, text in folded.items())


def _style(
    placed: Placed,
    fqn: str,
    own: Mapping[str, TensorPlan],
    inputs: Mapping[str, str],
    outputs: Mapping[str, str],
    whys: _Whys,
) -> tuple[str, str]:
    cut = next((t for t in own.values() if t.tp_dim is not None), None)
    if fqn in placed.lookups:
        return "embedding_rowwise", "rows are looked up where they live; the parts are summed"
    if cut is not None:
        if any(kind.startswith("S(") for kind in outputs.values()):
            return "colwise_gather_output", cut.why
        first = cut.tied_to or next(n for n, t in own.items() if t is cut)
        return ("rowwise" if first in whys.summed else "colwise"), cut.why
    if outputs or inputs:
        if any(kind.startswith("P->") for kind in outputs.values()):
            return "region", "what it returns is a partial sum"
        return "region", "work inside is divided; the gradient of what enters is summed"
    return "replicate", next((t.why for t in own.values() if t.grad_sum), "")


def _folded(plans: Mapping[str, ModulePlan]) -> dict[str, ModulePlan]:
    texts = {fqn: json.dumps(asdict(plan)) for fqn, plan in plans.items()}
    return {pattern: module_plan(json.loads(text)) for pattern, text in fold_strings(texts).items()}


def _coverage(placed: Placed, parameters: Mapping[str, TensorPlan], sizes: cost.Sizes) -> Coverage:
    total = cut = 0
    left: dict[tuple[str, str], int] = defaultdict(int)
    own = {fqn: t for fqn, t in parameters.items() if t.tied_to is None}
    texts = {}
    weights = {}
    for fqn, tensor in own.items():
        size = dtype_bytes(tensor.dtype)
        for extent in tensor.shape:
            size *= extent
        total += size
        if tensor.tp_dim is not None:
            cut += size
        else:
            texts[fqn], weights[fqn] = tensor.why, size
    for pattern, why in fold_strings(texts).items():
        left[pattern, why] = sum(weights[fqn] for fqn in unfold(pattern))
    flops = done = 0
    summed: dict[str, bool] = defaultdict(bool)
    for item in placed.chosen.factored.contractions:
        summed[item.op] |= bool(count(item.factor, placed.chosen.inner))
    live = {value for c in placed.chosen.cuts for value, _ in c.touched}
    for op in placed.chosen.factored.traced.ops:
        one = cost.matmul_flops(op, placed, sizes)
        flops += one
        if one and (
            summed[op.name]
            or placed.chosen.gathered_dim(op.name) is not None
            or (
                op.name in live
                and any(count(d, placed.chosen.leaves_in(op.name)) for d in placed.chosen.factored.single(op.name))
            )
        ):
            done += one
    rows = sorted(((p, size / max(total, 1), why) for (p, why), size in left.items()), key=lambda row: -row[1])
    return Coverage(cut / max(total, 1), done / max(flops, 1), tuple(rows))


def _assumptions(placed: Placed) -> tuple[str, ...]:
    traced = placed.chosen.factored.traced
    kept = {o.path.rpartition(".")[2] for o in traced.outputs if o.state and placed.states[o.value].value != "R"}
    found = list(traced.assumptions)
    if placed.settings:
        found.append(
            f"{len(placed.settings)} integer attributes become a rank's share: code that the trace did not run "
            "(another mode, another branch) must want the same"
        )
    if placed.rewrites:
        number = sum(map(len, placed.rewrites.values()))
        found.append(
            f"the code is rewritten: {number} arguments of calls, in {len(placed.rewrites)} modules' own copies "
            "of it; what the trace did not run is as it was"
        )
    if kept:
        names = ", ".join(sorted(kept))
        found.append(f"each tp rank keeps its own share of the state the model returns ({names})")
    return tuple(found)


def _warnings(placed: Placed, draws: Draws) -> tuple[str, ...]:
    found = list(placed.chosen.factored.traced.warnings)
    unknown: dict[str, list[str]] = defaultdict(list)
    for target, where in placed.chosen.factored.unknown:
        unknown[target].append(where)
    for target, places in unknown.items():
        found.append(f"no rule for {target} ({len(places)} uses, first at {places[0]}): what it touches stays whole")
    if draws.mixed:
        where = f"{len(draws.mixed)} uses, first at {draws.mixed[0].where}"
        found.append(
            f"each tp rank drops the same places of its share ({where}): the same code draws for whole values too; "
            "move one of them into a module of its own"
        )
    if placed.chosen.degree > 1 and not placed.chosen.cuts:
        found.append(f"nothing is cut over tp={placed.chosen.degree}: every tp rank does all the work")
    return tuple(found)
