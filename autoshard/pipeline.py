"""The passes in a straight line: trace, factorise, choose cuts, place, localise, wrap, choose the mesh, emit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, TypeVar

from torch import nn

from autoshard.cluster import Cluster
from autoshard.errors import IndivisibleHeads, InvalidArgument, UnknownModule, near
from autoshard.ir import Traced
from autoshard.passes.choice import advise, explain_choice
from autoshard.passes.choose_mesh import ChooseMesh
from autoshard.passes.cut import ChooseCuts
from autoshard.passes.cut_logits import CutLogits, refusal
from autoshard.passes.emit import Emit
from autoshard.passes.factorise import Factored, Factorise
from autoshard.passes.factors import leaves
from autoshard.passes.inside import Inside, find_texts
from autoshard.passes.listen import draws_in_training
from autoshard.passes.localise import Localise
from autoshard.passes.occurrence import Occurrences
from autoshard.passes.place import Place
from autoshard.passes.price import Pricing
from autoshard.passes.pricing import Pricer
from autoshard.passes.resize import Resize
from autoshard.passes.sequence import Sequence
from autoshard.passes.states import Placed
from autoshard.passes.trace import Trace
from autoshard.passes.weights import main_dtype
from autoshard.passes.wrap import Wrap
from autoshard.plans import MeshChoice, PassTime, Plan, Refusal, Workload
from autoshard.replace import find

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        world: number of ranks.
        tp: pinned degree, or None; likewise ``dp_shard`` and ``dp_replicate``.
        batch: sequences per data-parallel rank.
        sequence: tokens per sequence.
        dtype: dtype of activations; None takes the parameters' own.
        cluster: the devices and what joins them.
        global_batch: sequences of one step over all data ranks, or None.
        optimizer: ``adamw``, ``sgd`` or ``sgd-momentum``.
        mixed_precision: ``"bfloat16"`` computes in it, on parameters that are stored as they are; or None.
        masters: ``"float32"`` stores trained parameters in it, whatever they compute in; or None.
        checkpointing: pinned ``none``, ``selective`` or ``full``; None to choose.
        reshard: pinned: whether FSDP frees a unit's parameters after its forward; None to choose.
        overrides: ``"replicate"`` by module or parameter pattern.
        example_inputs: what the forward is traced with, or None.
        check_heads: whether a pinned tp under which no attention is cut is refused.
        sequence_parallel: whether the sequence is cut between regions in training; None to choose.
        logits: ``sharded`` where the model is to return logits as they are cut over tp, in training; or ``whole``.
    """

    world: int
    tp: int | None = None
    dp_shard: int | None = None
    dp_replicate: int | None = None
    batch: int = 1
    sequence: int = 2048
    dtype: str | None = None
    cluster: Cluster = field(default_factory=Cluster.of)
    global_batch: int | None = None
    optimizer: str = "adamw"
    mixed_precision: str | None = None
    masters: str | None = None
    checkpointing: str | None = None
    reshard: bool | None = None
    overrides: Mapping[str, str] = field(default_factory=dict)
    example_inputs: Any = None
    check_heads: bool = True
    sequence_parallel: bool | None = None
    logits: str = "whole"

    def meshes(self) -> ChooseMesh:
        """Return what chooses among the meshes."""
        return ChooseMesh(
            self.world,
            self.tp,
            self.dp_shard,
            self.dp_replicate,
            self.cluster.device.memory_bytes,
            self.cluster.devices_per_node,
            self.batch,
            self.global_batch,
            self.sequence,
            self.checkpointing,
            self.reshard,
            self.sequence_parallel,
        )

    def workload(self, traced: Traced) -> Workload:
        """Return what a step computes, and in what."""
        own = main_dtype(traced)
        narrow = self.mixed_precision is not None or self.masters is not None
        dtype = self.mixed_precision or self.dtype or own
        return Workload(self.batch, self.sequence, dtype, self.optimizer, self.masters, "float32" if narrow else None)


def run(model: nn.Module, options: Options, progress: Callable[[str], None] | None = None) -> tuple[Plan, Stages]:
    """Return the plan of ``model`` and every stage on the way to it."""
    clock = _Clock(progress)
    meshes = options.meshes()
    meshes.check()
    traced = clock.run("trace", lambda: Trace(options.example_inputs).run(model), _count_ops)
    workload = options.workload(traced)
    pinned = _overrides(model, options.overrides)
    factored = clock.run("factorise", lambda: Factorise().run(traced), _count_factors)
    units = clock.run("wrap", lambda: Wrap().run(traced), lambda u: f"{len(u)} FSDP units")
    texts = cache(lambda: find_texts(model, traced))
    sharded = options.logits == "sharded"
    solver = _Solver(factored, pinned, weigh=options.tp is None, texts=texts, cut_logits=sharded)

    drawing = cache(lambda: draws_in_training(model, traced))
    pricer = Pricer(solver.place, lambda placed: Sequence(drawing()).hope(placed), units, workload, options.cluster)
    choices = clock.run("choose mesh", lambda: meshes.run(pricer), lambda r: str(r[0].mesh))
    placed = _settle(model, solver, choices[0], drawing, clock, traced.inputs)
    if choices[0].sequence_parallel and not placed.sequence.dims and options.sequence_parallel is None:
        # the code follows no cut of the sequence: without that hope another mesh may be better
        meshes = replace(meshes, sequence_parallel=False)
        choices = clock.run("choose mesh", lambda: meshes.run(pricer), lambda r: str(r[0].mesh))
        placed = _settle(model, solver, choices[0], drawing, clock, traced.inputs)
    choice = choices[0]
    mesh, workload = choice.mesh, replace(workload, batch=choice.batch)
    if options.check_heads and options.tp is not None and options.tp > 1:
        _check_heads(placed, options.tp)
    if sharded and mesh.tp > 1 and not placed.logits:
        raise refusal(placed)
    pricing = pricer.made(placed)
    price = pricing.run(mesh, workload, choice.checkpointing, choice.reshard)
    why = explain_choice(choices, meshes, options.cluster.device.name)
    help_ = advise(choice, meshes, pricer, workload)
    if sharded and mesh.tp == 1:
        help_ = (*help_, "logits are whole: with tp=1 there is nothing to cut them over")
    refused, device = tuple(solver.refusals(mesh.tp)), options.cluster.device.name
    draws = drawing() if placed.chosen.cuts else {}
    emit = Emit(price, workload, units, device, why, choices, refused, find(model), draws, help_)
    plan = clock.run("emit", lambda: emit.run(placed), lambda p: f"{len(p.modules)} module patterns")
    return replace(plan, times=tuple(clock.times)), Stages(traced, factored, placed, pricer, pricing)


def _settle(
    model: nn.Module,
    solver: _Solver,
    choice: MeshChoice,
    drawing: Callable[[], Mapping[str, int]],
    clock: _Clock,
    given: Any,
) -> Placed:
    """Return the placed cuts of a mesh that the user's code follows."""
    tp = choice.mesh.tp
    clock.run("cut and place", lambda: solver.place(tp), _count_cuts)
    placed = clock.run("localise", lambda: solver.localise(model, tp, given), _count_cuts)
    if not choice.sequence_parallel:
        return placed
    return clock.run("sequence", lambda: Sequence(drawing()).run(model, placed), _count_stretches)


@dataclass(frozen=True)
class Stages:
    """What the passes handed on, for ``--dump-dir`` and tests."""

    traced: Traced
    factored: Factored
    placed: Placed
    pricer: Pricer
    pricing: Pricing


class _Clock:
    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.times: list[PassTime] = []
        self.progress = progress

    def run(self, name: str, work: Callable[[], T], summary: Callable[[T], str]) -> T:
        if self.progress:
            self.progress(name)
        start = time.perf_counter()
        result = work()
        self.times.append(PassTime(name, time.perf_counter() - start, summary(result)))
        return result


class _Solver:
    """Chooses and places cuts until nothing is sent back, once per tp degree."""

    def __init__(
        self,
        factored: Factored,
        pinned: Mapping[str, str],
        weigh: bool,
        texts: Callable[[], Inside],
        cut_logits: bool = False,
    ) -> None:
        self.index = Occurrences(factored)
        self.cut_logits = cut_logits
        self.pinned = pinned
        self.weigh = weigh
        self.texts = texts
        self.banned: dict[int, dict[str, Refusal]] = {}
        self.placed: dict[int, Placed] = {}

    def place(self, tp: int) -> Placed:
        """Return the placed cuts for a degree."""
        while tp not in self.placed:
            banned = self.banned.setdefault(tp, {})
            chosen = ChooseCuts(tp, dict(banned), self.pinned, self.weigh).run(self.index)
            placed = Place(self.texts).run(chosen)
            if placed.refused:
                banned.update(placed.refused)
            else:
                self.placed[tp] = CutLogits().run(placed) if self.cut_logits else placed
        return self.placed[tp]

    def localise(self, model: nn.Module, tp: int, given: Any) -> Placed:
        """Return the placed cuts that the user's code follows, with attributes set and calls rewritten for that."""
        while True:
            placed = self.place(tp)
            refused = Localise(given).run(model, placed)
            if refused and placed.resizable:
                placed, stuck = Resize(given).run(model, placed)
                helped = placed.settings or placed.rewrites
                # a size that nothing makes local says more than the line that it breaks
                refused = stuck or (Localise(given).run(model, placed) if helped else refused)
            if not refused:
                self.placed[tp] = placed
                return placed
            self.banned[tp].update(refused)
            del self.placed[tp]

    def refusals(self, tp: int) -> list[Refusal]:
        """Return what was sent back for a degree."""
        cut = {fqn for c in self.place(tp).chosen.cuts for fqn in c.divisions}
        return [r for r in self.banned.get(tp, {}).values() if r.fqn not in cut]


def _overrides(model: nn.Module, overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the reason by name of each parameter that an override keeps whole."""
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    modules = [fqn for fqn, _ in model.named_modules() if fqn]
    pinned: dict[str, str] = {}
    for pattern, style in overrides.items():
        if style != "replicate":
            raise InvalidArgument(
                f"the override {style!r} is not known", at=pattern, got=f"{style!r}; allowed: 'replicate'"
            )
        hit = [n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, pattern + ".*")]
        if not hit:
            raise UnknownModule(f"no module or parameter is named {pattern!r}", help=near(pattern, modules + names))
        pinned.update(dict.fromkeys(hit, f"the override {pattern!r} keeps it whole"))
    return pinned


def _check_heads(placed: Placed, tp: int) -> None:
    """Refuse a pinned tp under which no attention is cut because its heads do not divide."""
    factored = placed.chosen.factored
    held = {leaf for p in factored.traced.parameters if p.value for d in factored.single(p.value) for leaf in leaves(d)}
    heads: list[tuple[int, str, str]] = []
    for op in factored.traced.ops:
        if op.target != "aten.scaled_dot_product_attention":
            continue
        value = op.arguments["value"]
        found = [f for d in factored.single(value.name)[:-2] for f in leaves(d) if f in held and not f.blocks]
        if any(f in placed.chosen.inner for f in found):
            return
        heads += [(f.size, op.module, op.where) for f in found if f.size % tp]
    if heads:
        size, module, where = heads[0]
        allowed = [d for d in range(1, size + 1) if size % d == 0]
        raise IndivisibleHeads(
            f"cannot split {size} attention heads over {tp} tensor-parallel ranks",
            at=f"{module} ({where})",
            got=f"tp={tp}, heads={size}; allowed: {', '.join(map(str, allowed))}",
            help=f"pass --tp {max(d for d in allowed if d <= tp)}, or leave tp to the planner",
        )


def _count_ops(traced: Traced) -> str:
    return f"{len(traced.ops)} ops, {len(traced.calls)} module calls"


def _count_factors(factored: Factored) -> str:
    return f"{len(factored.contractions)} contractions, {len(factored.unknown)} ops without a rule"


def _count_stretches(placed: Placed) -> str:
    return f"{len(placed.sequence.dims)} values cut, {len(placed.sequence.conversions)} conversions"


def _count_cuts(placed: Placed) -> str:
    return f"{len(placed.chosen.cuts)} cuts, {len(placed.conversions)} conversions"
