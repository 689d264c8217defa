"""The model of cost: its equations, its choice against exhaustive search, and what autograd really keeps."""

from __future__ import annotations

import inspect
import itertools
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build, token_loss
from rows import few
from torch.autograd.graph import saved_tensors_hooks

from autoshard import cost
from autoshard.cluster import Cluster
from autoshard.errors import InvalidArgument, MeshMismatch
from autoshard.exploring import what_if
from autoshard.passes.choose_mesh import CHECKPOINTING, TIE, Asked, ChooseMesh
from autoshard.passes.extents import at
from autoshard.passes.formula import B, T, r, s, t, write_out
from autoshard.passes.price import Price
from autoshard.passes.pricing import Pricer
from autoshard.pipeline import Options, Stages, run
from autoshard.plans import Mesh, Plan, Workload

IDS = torch.zeros(2, 7, dtype=torch.long)


@cache
def made(name: str, tp: int = 2) -> tuple[Plan, Stages]:
    model = build(name, torch.float32)
    inputs = {"input_ids": IDS} if hasattr(model, "config") else (IDS,)
    return run(model, Options(world=tp, tp=tp, batch=2, sequence=7, example_inputs=inputs))


def pricer(name: str = "llama", **cluster: Any) -> Pricer:
    return replace(made(name)[1].pricer, cluster=Cluster.of(**cluster))


# --- the equations ---


def numbered() -> dict[int, str]:
    """The function that each equation at the top of ``cost`` names."""
    text = inspect.getdoc(cost) or ""
    found = re.findall(r"^ +\((\d+)\).*?-> ``(\w+)``", text, re.MULTILINE | re.DOTALL)
    return {int(number): name for number, name in found}


def test_every_equation_names_a_function_that_names_it() -> None:
    equations = numbered()
    assert sorted(equations) == list(range(1, 16))
    for number, name in equations.items():
        doc = inspect.getdoc(getattr(cost, name)) or ""
        said = [int(n) for n in re.findall(r"\d+", doc.partition(":")[0].partition(".")[0])]
        assert number in said, f"{name} does not say that it is equation {number}"


@pytest.mark.parametrize("name", few(["llama", "decoder", "qwen3"], 2))
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_symbolic_is_numeric(name: str, checkpointing: str) -> None:
    plan, stages = made(name)
    written = write_out(stages.pricing, plan.workload, checkpointing)
    for mesh, batch, sequence in [(Mesh(1, 2, 2), 1, 64), (Mesh(2, 4, 2), 3, 128), (Mesh(4, 2, 2), 2, 4096)]:
        workload = replace(plan.workload, batch=batch, sequence=sequence)
        price = stages.pricing.run(mesh, workload, checkpointing, True)
        numbers = {"B": batch, "T": sequence, "t": mesh.tp, "s": mesh.dp_shard, "r": mesh.dp_replicate}
        for kind in ("parameters", "gradients", "optimizer", "activations", "loss"):
            assert written.value(written.memory[kind], **numbers) == price.memory[kind]
        assert written.value(written.memory["peak"], **numbers) == price.peak - stages.pricing.buffers
        sent: dict[str, float] = {}
        for one in price.collectives:
            if one.what != "gradient sum":
                sent[f"{one.axis} {one.op}"] = sent.get(f"{one.axis} {one.op}", 0) + one.bytes
        assert {key: written.value(written.sent[key], **numbers) for key in sent} == sent


def test_expressions_are_in_the_five_symbols() -> None:
    plan, stages = made("llama")
    written = write_out(stages.pricing, plan.workload, "none")
    symbols = set().union(*(size.free_symbols for size in (*written.memory.values(), *written.sent.values())))
    assert symbols <= {B, T, t, s, r}
    assert written.memory["peak"].atoms(sympy.Max)


# --- what autograd keeps ---


def really_kept(name: str, batch: int, length: int) -> int:
    """Bytes that a forward leaves for backward, each storage once, without parameters and inputs."""
    model = build(name, torch.float32)
    ids = torch.randint(0, 20, (batch, length))
    held = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers(), ids]}
    kept: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        key = tensor.untyped_storage().data_ptr()
        if key not in held:
            kept[key] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        answer = model(input_ids=ids) if hasattr(model, "config") else model(ids)
    token_loss(answer, ids)
    return sum(kept.values())


@pytest.mark.parametrize("name", ["decoder", "head norms", "tied", "nano", "residual inside"])
def test_kept_is_what_autograd_keeps(name: str) -> None:
    model = build(name, torch.float32)
    plan, _ = run(model, Options(world=1, tp=1, batch=3, sequence=16, example_inputs=(IDS,)))
    assert plan.memory_bytes["activations"] == pytest.approx(really_kept(name, 3, 16), rel=0.02)


# --- the choice ---


def axes(mesh: Mesh) -> int:
    return sum(degree > 1 for degree in (mesh.dp_replicate, mesh.dp_shard, mesh.tp))


def search(prices: Pricer, meshes: ChooseMesh) -> tuple[Mesh, str]:
    """Price every factorisation and way to train, with nothing left out, and take the best."""
    found = []
    for shape in itertools.product(range(1, meshes.world + 1), repeat=3):
        mesh = Mesh(*shape)
        if mesh.world != meshes.world or (mesh.tp > 1 and not prices.useful(mesh.tp)):
            continue
        fitting: list[Price] = []
        for checkpointing, along in itertools.product(CHECKPOINTING, (False, True) if mesh.tp > 1 else (False,)):
            tried = [prices.price(Asked(mesh, meshes.batch, checkpointing, held, along)) for held in (True, False)]
            inside = [p for p in tried if p.peak <= meshes.budget]
            if tried[0] in inside:
                slower = tried[1] not in inside or tried[1].step >= tried[0].step * (1 - TIE)
                fitting.append(tried[0] if slower else tried[1])
        if fitting:
            best = fitting[0]
            found.append((meshes.batch * mesh.data / best.step, best))
    top = max(speed for speed, _ in found)
    tied = [p for speed, p in found if speed >= top * (1 - TIE)]
    winner = min(tied, key=lambda p: (axes(p.mesh), p.mesh.tp, p.mesh.dp_replicate))
    return winner.mesh, winner.checkpointing


@pytest.mark.parametrize("world", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("memory", [2**20, 2**21, 2**23, 2**30])
def test_the_choice_is_that_of_exhaustive_search(world: int, memory: int) -> None:
    prices = pricer()
    meshes = ChooseMesh(world, memory_bytes=memory, batch=2, sequence=7)
    best = meshes.run(prices)[0]
    if best.fits:
        assert (best.mesh, best.checkpointing) == search(prices, meshes)


def test_every_mesh_is_looked_at_and_multiplies_to_the_world() -> None:
    for world in (1, 6, 8, 12):
        choices = ChooseMesh(world, batch=2, sequence=7).run(pricer())
        shapes = {(c.mesh.dp_replicate, c.mesh.dp_shard, c.mesh.tp) for c in choices}
        near = [
            x for x in itertools.product(range(1, world + 1), repeat=3) if x[0] * x[1] * x[2] == world and x[2] <= 8
        ]
        assert shapes == set(near)
        assert all(c.mesh.world == world for c in choices)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.floats(0.5, 64), st.floats(1, 8))
def test_more_memory_never_makes_a_mesh_infeasible(world: int, mib: float, times: float) -> None:
    small, large = (
        ChooseMesh(world, memory_bytes=int(size * 2**20), batch=2, sequence=64).run(pricer())
        for size in (mib, mib * times)
    )
    fits = {c.mesh for c in small if c.fits}
    assert fits <= {c.mesh for c in large if c.fits}


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 64), st.integers(1, 2**34), st.integers(1, 2**34), st.sampled_from(["all_reduce", "all_gather"]))
def test_cost_is_monotone_in_bytes(n: int, small: int, more: int, op: str) -> None:
    assert cost.ring_seconds(op, small, 1, n, 1e9, 1e-6) < cost.ring_seconds(op, small + more, 1, n, 1e9, 1e-6)


def test_an_axis_that_stays_in_a_node_takes_the_link_and_one_across_shares_the_network() -> None:
    assert cost.bandwidth(8, 1, 8, 450e9, 50e9) == (450e9, True)
    assert cost.bandwidth(4, 8, 8, 450e9, 50e9) == (50e9, False)
    assert cost.bandwidth(16, 2, 8, 450e9, 50e9) == (200e9, False)
    assert cost.bandwidth(64, 1, 8, 450e9, 50e9) == (400e9, False)


def test_a_global_batch_smaller_than_the_world_forces_tp() -> None:
    best = ChooseMesh(8, global_batch=4, sequence=64).run(pricer())[0]
    assert best.mesh.data <= 4 and best.mesh.tp >= 2
    assert best.batch * best.mesh.data == 4
    with pytest.raises(MeshMismatch, match="no mesh of 8 ranks can share out a global batch of 3"):
        ChooseMesh(8, tp=1, global_batch=3).run(pricer())


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    prices = pricer()
    meshes = ChooseMesh(4, memory_bytes=2**22, batch=1, sequence=64, checkpointing="none")
    for choice in meshes.run(prices):
        if not choice.max_batch:
            continue
        peaks = [
            prices.price(Asked(choice.mesh, choice.max_batch + more, "none", choice.reshard)).peak for more in (0, 1)
        ]
        assert peaks[0] <= meshes.budget < peaks[1]


def test_what_does_not_fit_says_what_would() -> None:
    model = build("llama", torch.float32)
    tiny = Cluster.of(memory=2.4 / 1024)
    options = Options(world=2, batch=64, sequence=64, cluster=tiny, example_inputs={"input_ids": IDS})
    plan, _ = run(model, options)
    assert "nothing fits" in plan.why_mesh
    (batch,) = [int(m[1]) for w in plan.warnings if (m := re.match(r"a batch of (\d+) sequences", w))]
    fitting, _ = run(model, replace(options, batch=batch, tp=plan.mesh.tp, dp_shard=plan.mesh.dp_shard))
    assert fitting.peak_bytes <= tiny.device.memory_bytes * cost.MARGIN
    assert any("another axis" in warning for warning in plan.warnings)


def test_what_if_gives_what_a_plan_of_its_own_gives() -> None:
    model = build("llama", torch.float32)
    given_inputs = {"input_ids": IDS}
    rows = what_if(model, "world", [2, 4, 8], example_inputs=given_inputs, batch=2, sequence=64)
    for world, choice in rows:
        plan, _ = run(model, Options(world=world, batch=2, sequence=64, example_inputs=given_inputs))
        assert choice == plan.meshes[0]
    with pytest.raises(InvalidArgument, match="no setting is called 'tokens'"):
        what_if(model, "tokens", [1], 2)


def test_precision_is_priced() -> None:
    model = build("llama", torch.bfloat16)
    inputs = {"input_ids": IDS}
    plain, _ = run(model, Options(world=2, tp=1, example_inputs=inputs))
    masters, _ = run(model, Options(world=2, tp=1, masters="float32", example_inputs=inputs))
    for kind in ("parameters", "gradients", "optimizer"):
        assert masters.memory_bytes[kind] == 2 * plain.memory_bytes[kind]
    assert masters.workload == Workload(1, 2048, "bfloat16", "adamw", "float32", "float32")
    sent = {(c.op, c.axis): c.bytes for c in plain.collectives}
    wide = {(c.op, c.axis): c.bytes for c in masters.collectives}
    assert wide["all_gather", "dp_shard"] == sent["all_gather", "dp_shard"]
    assert wide["reduce_scatter", "dp_shard"] == 2 * sent["reduce_scatter", "dp_shard"]


def test_a_cut_sequence_takes_nothing_off_the_matmuls_whose_sums_it_scatters() -> None:
    prices = pricer()
    whole, along = prices.of(2).profile, prices.of(2, sequence=True).profile
    blocks = [(one, other) for one, other in zip(whole.units, along.units, strict=True) if one.block]
    assert blocks
    for one, other in blocks:
        assert one.flops == other.flops
        # what selective checkpointing keeps of them is what they make, before it is scattered
        assert one.dear == other.dear
        assert at(one.kept, 2, 7, 2) > at(other.kept, 2, 7, 2)
        assert at(one.moved, 2, 7, 2) > at(other.moved, 2, 7, 2)
