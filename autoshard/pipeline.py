"""The passes in a straight line: trace, factorise, choose cuts, place, localise, wrap, choose the mesh, emit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, TypeVar

from torch import nn

from autoshard.cluster import Cluster
from autoshard.errors import IndivisibleHeads, InvalidArgument, UnknownModule, near
from autoshard.ir import Traced
from autoshard.passes.choice import advise, explain_choice
from autoshard.passes.choose_mesh import ChooseMesh
from autoshard.passes.cut_logits import refusal
from autoshard.passes.emit import Emit
from autoshard.passes.factorise import Factored, Factorise
from autoshard.passes.factors import leaves
from autoshard.passes.homes import Homes
from autoshard.passes.inside import find_texts
from autoshard.passes.listen import draws_in_training
from autoshard.passes.price import Pricing
from autoshard.passes.pricing import Pricer
from autoshard.passes.sequence import Sequence
from autoshard.passes.states import Placed
from autoshard.passes.trace import Trace
from autoshard.passes.weights import main_dtype
from autoshard.passes.wrap import Wrap
from autoshard.plans import MeshChoice, PassTime, Plan, Workload
from autoshard.replace import find
from autoshard.solver import Solver

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
        tp_reduce_dtype: what sums over tp run in; None for the dtype of each value.
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
    tp_reduce_dtype: str | None = None
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
        reduced = "float32" if narrow else None
        return Workload(self.batch, self.sequence, dtype, self.optimizer, self.masters, reduced, self.tp_reduce_dtype)


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
    solver = Solver(factored, pinned, weigh=options.tp is None, texts=texts, cut_logits=sharded)

    drawing = cache(lambda: draws_in_training(model, traced))
    along = cache(lambda: Sequence(drawing()))
    homes = Homes(traced, units)
    pricer = Pricer(solver.place, lambda placed: along().hope(placed), homes, workload, options.cluster)
    settle = partial(_settle, model, solver, along, clock, traced.inputs)
    meshes, choices, placed = _agree(meshes, pricer, settle, clock, options.sequence_parallel is None)
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


def _agree(
    meshes: ChooseMesh,
    pricer: Pricer,
    settle: Callable[[MeshChoice], tuple[Placed, bool]],
    clock: _Clock,
    may_leave_sequence: bool,
) -> tuple[ChooseMesh, tuple[MeshChoice, ...], Placed]:
    """Choose a mesh, the fastest first, until the user's code follows the cuts that were priced.

    Returns:
        What chose, the meshes with the chosen one first, and its placed cuts.
    """
    while True:
        choices = clock.run("choose mesh", partial(meshes.run, pricer), lambda r: str(r[0].mesh))
        placed, as_priced = settle(choices[0])
        if not as_priced:
            pricer.forget(choices[0].mesh.tp)
        elif choices[0].sequence_parallel and not placed.sequence.dims and may_leave_sequence:
            # the code follows no cut of the sequence: without that hope another mesh may be better
            meshes, may_leave_sequence = replace(meshes, sequence_parallel=False), False
        else:
            return meshes, choices, placed


def _settle(
    model: nn.Module,
    solver: Solver,
    along: Callable[[], Sequence],
    clock: _Clock,
    given: Any,
    choice: MeshChoice,
) -> tuple[Placed, bool]:
    """Return the placed cuts of a mesh that the user's code follows, and whether those are the ones it had."""
    tp = choice.mesh.tp
    before = clock.run("cut and place", lambda: solver.place(tp), _count_cuts)
    placed = clock.run("localise", lambda: solver.localise(model, tp, given), _count_cuts)
    as_priced = placed.chosen.divisions.keys() == before.chosen.divisions.keys()
    if not as_priced or not choice.sequence_parallel:
        return placed, as_priced
    return clock.run("sequence", lambda: along().run(model, placed), _count_stretches), True


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
