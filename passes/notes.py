"""What a plan says of itself: the share that is cut, what it takes for granted, what to look out for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autoshard.dtypes import dtype_bytes
from autoshard.folding import fold_strings
from autoshard.passes.draws import Draws
from autoshard.passes.extents import Extents, at
from autoshard.passes.factors import count
from autoshard.passes.flops import Flops
from autoshard.passes.states import Placed
from autoshard.patterns import unfold
from autoshard.plans import Coverage, TensorPlan, Workload


def coverage(placed: Placed, parameters: Mapping[str, TensorPlan], workload: Workload) -> Coverage:
    """Return the shares of parameter bytes and of matmul FLOPs that are cut, and what is left whole with its reason."""
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
    counting = Flops(placed, Extents.of(placed))
    flops = done = 0.0
    summed: dict[str, bool] = defaultdict(bool)
    for item in placed.chosen.factored.contractions:
        summed[item.op] |= bool(count(item.factor, placed.chosen.inner))
    live = {value for c in placed.chosen.cuts for value, _ in c.touched}
    for op in placed.chosen.factored.traced.ops:
        one = float(at(counting.of(op, whole=True), workload.batch, workload.sequence, 1))
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


def assumptions(placed: Placed) -> tuple[str, ...]:
    """Return what the plan takes for granted, one sentence each."""
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
    for output in (o for o in traced.outputs if o.value in placed.logits - placed.joined):
        found.append(
            f"{output.path or 'the result'} is a DTensor, cut over tp along its last dim, where gradients are kept, "
            "for torch's loss_parallel; it is whole under torch.no_grad()"
        )
    if kept:
        names = ", ".join(sorted(kept))
        found.append(f"each tp rank keeps its own share of the state the model returns ({names})")
    return tuple(found)


def warnings(placed: Placed, draws: Draws) -> tuple[str, ...]:
    """Return what to look out for, one sentence each."""
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
    found += placed.sequence.notes
    if placed.chosen.degree > 1 and not placed.chosen.cuts:
        found.append(f"nothing is cut over tp={placed.chosen.degree}: every tp rank does all the work")
    return tuple(found)
