"""The passes on small models: what they find, what they refuse, what they leave alone."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from models import Attention, Decoder, Mlp, Norm, build
from renaming import rename
from torch import Tensor, nn

from autoshard.api import plan as make_plan
from autoshard.errors import IndivisibleHeads, InvalidArgument, MeshMismatch, UnknownModule
from autoshard.passes.trace import Trace
from autoshard.pipeline import Options, run
from autoshard.plans import Plan
from autoshard.proving.verification import verify

IDS = (torch.zeros(2, 7, dtype=torch.long),)
X = (torch.zeros(2, 7, 32),)


def decoder_plan(tp: int = 2, **options: object) -> Plan:
    return make_plan(Decoder(), world=tp, tp=tp, example_inputs=IDS, **options)  # type: ignore[arg-type]


def test_decoder_is_cut_as_by_hand() -> None:
    plan = decoder_plan()
    dims = {fqn.removeprefix("blocks.0."): t.tp_dim for fqn, t in plan.parameters.items() if "blocks.1" not in fqn}
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        assert (dims[f"{name}.weight"], dims[f"{name}.bias"]) == (0, 0)
    for name in ("attention.o", "mlp.down"):
        assert (dims[f"{name}.weight"], dims[f"{name}.bias"]) == (1, None)
        assert plan.parameters[f"blocks.0.{name}.bias"].read == "first_rank"
    assert (dims["embedding.weight"], dims["head.weight"], dims["norm.weight"]) == (0, 0, None)
    assert plan.modules["blocks.{0-1}.attention"].inputs == {"x": "R->V"}
    assert plan.modules["blocks.{0-1}.mlp.down"].outputs == {"": "P->R"}
    assert plan.modules["embedding"].lookup == "input"
    assert plan.modules["head"].outputs == {"": "S(-1)->R"}
    assert plan.coverage.matmul_flops == 1.0
    assert not plan.warnings


def test_a_layer_costs_four_all_reduces() -> None:
    one, two = (
        next(
            c
            for c in make_plan(Decoder(layers=n), world=2, tp=2, example_inputs=IDS).collectives
            if c.op == "all_reduce"
        )
        for n in (1, 2)
    )
    assert two.count - one.count == 4


def test_residual_inside_the_attention_enters_once_beside_it() -> None:
    plan = make_plan(Decoder(residual=True, layers=1), world=2, tp=2, example_inputs=IDS)
    assert "blocks.0.attention" not in plan.modules  # the residual must bypass the region
    shares = {dict(plan.modules[f"blocks.0.attention.{name}"].share)["input"] for name in "qkv"}
    assert len(shares) == 1
    assert all(plan.modules[f"blocks.0.attention.{name}"].inputs == {"input": "R->V"} for name in "qkv")
    count = sum(c.count for c in plan.collectives if c.op == "all_reduce")
    assert count == 4 + 2  # a layer, the embedding's sum and the head's entry


def test_norms_over_heads_take_a_summed_gradient() -> None:
    plan = make_plan(Decoder(head_norm=True), world=2, tp=2, example_inputs=IDS)
    summed = {fqn for fqn, t in plan.parameters.items() if t.grad_sum}
    assert summed == {f"blocks.{i}.attention.{n}_norm.weight" for i in (0, 1) for n in "qk"}
    sums = [c for c in plan.collectives if c.what == "gradient sum"]
    assert [(c.axis, c.count) for c in sums] == [("tp", 2)]  # one per unit


def test_a_frozen_norm_needs_no_sum() -> None:
    model = Decoder(head_norm=True)
    model.requires_grad_(False)
    plan = make_plan(model, world=2, tp=2, example_inputs=IDS)
    assert not any(t.grad_sum for t in plan.parameters.values())


def test_ties_are_one_parameter() -> None:
    plan = make_plan(Decoder(tied=True), world=2, tp=2, example_inputs=IDS)
    assert plan.parameters["head.weight"].tied_to == "embedding.weight"
    assert plan.parameters["head.weight"].tp_dim == plan.parameters["embedding.weight"].tp_dim == 0
    assert plan.modules["embedding"].lookup == "input"


def test_vocabulary_that_does_not_divide_stays_whole() -> None:
    plan = make_plan(Decoder(vocab=25), world=2, tp=2, example_inputs=IDS)
    assert plan.parameters["head.weight"].tp_dim is None
    assert "25 does not divide by tp=2" in plan.parameters["head.weight"].why
    assert plan.parameters["blocks.0.attention.q.weight"].tp_dim == 0


@pytest.mark.parametrize(("tp", "heads"), [(3, 2)])
def test_pinned_tp_that_no_head_count_divides_is_refused(tp: int, heads: int) -> None:
    with pytest.raises(IndivisibleHeads, match=rf"cannot split {heads} attention heads over {tp}") as error:
        decoder_plan(tp)
    assert error.value.at is not None
    assert "models.py:" in error.value.at
    assert "allowed: 1, 2" in str(error.value)


def test_fewer_kv_heads_than_ranks_are_copied() -> None:
    model = Decoder()
    plan = make_plan(model, world=4, tp=4, example_inputs=IDS)
    q, k, o = (plan.parameters[f"blocks.0.attention.{n}.weight"] for n in "qko")
    assert (q.tp_dim, o.tp_dim) == (0, 1)
    assert (k.read, k.slices) == ("slice", ((0, 16, 2),))
    assert k.why == "held whole, as more than one rank needs 16 of the 16 indices of dim 0; each reads its part"
    assert k.grad_sum is not None
    assert verify(model, plan, example_inputs=IDS).ok


class HardCoded(nn.Module):
    """The head count is a literal: the view is invalid on a share, or silently another one."""

    def __init__(self, silent: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.norm = nn.LayerNorm(32)
        self.mlp = Mlp()
        self.silent = silent

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        b, s, _ = x.shape
        shape = (b, -1, 4, 8) if self.silent else (b, s, 4, 8)
        q, k, v = (p(x).view(shape).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        y = self.o(y.reshape(b, -1, 32) if self.silent else y.reshape(b, s, 32))
        return self.norm(x + self.mlp(x) + y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("silent", [False, True])
def test_hard_coded_sizes_are_written_otherwise(silent: bool) -> None:
    plan = make_plan(HardCoded(silent), world=2, tp=2, example_inputs=X)
    assert [plan.parameters[f"{n}.weight"].tp_dim for n in "qkvo"] == [0, 0, 0, 1]
    assert plan.parameters["mlp.up.weight"].tp_dim == 0
    assert {str(one).partition(" ")[2] for one in plan.modules[""].rewrites} == {
        "shape -> (*shape[:2], shape[2] // 2, *shape[3:])",
        "32 -> 16",
    }
    assert verify(HardCoded(silent), plan, example_inputs=X).ok


class ScaledByWidth(nn.Module):
    """A number computed from a cut size would change its value without any shape telling."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h * h.shape[-1] ** -0.5)  # type: ignore[no-any-return]


def test_numbers_taken_from_cut_sizes_are_refused() -> None:
    plan = make_plan(ScaledByWidth(), world=2, tp=2, example_inputs=X)
    assert plan.modules["up"].style == "colwise_gather_output"
    assert "a number in the code follows the cut" in plan.parameters["up.weight"].why


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.gate_up, self.down = nn.Linear(32, 96), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return self.norm(self.down(F.silu(gate) * up))  # type: ignore[no-any-return]


def test_fused_projection_is_cut_in_parts() -> None:
    plan = make_plan(Fused(), world=2, tp=2, example_inputs=X)
    for name in ("gate_up.weight", "gate_up.bias"):
        assert plan.parameters[name].tp_dim == 0
        assert plan.parameters[name].tp_parts == ((0, 48), (48, 48))
    assert plan.parameters["down.weight"].tp_dim == 1


class Escapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = F.relu(self.up(x))
        return self.down(h), h


def test_what_the_model_returns_stays_whole() -> None:
    plan = make_plan(Escapes(), world=2, tp=2, example_inputs=X)
    assert plan.modules["up"].outputs == {"": "S(-1)->R"}
    assert "the model returns it (1)" in plan.parameters["up.weight"].why


class MixedUse(nn.Module):
    """One scale used on whole values and on the ranks' shares: its gradient would be neither whole nor partial."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * self.scale) + x * self.scale  # type: ignore[no-any-return]


def test_a_parameter_used_inside_and_outside_a_region_is_refused() -> None:
    plan = make_plan(MixedUse(), world=2, tp=2, example_inputs=X)
    assert plan.modules["up"].style == "colwise_gather_output"
    assert "used both on whole values and on the ranks' shares" in plan.parameters["up.weight"].why


def test_nothing_to_cut_is_said() -> None:
    plan = make_plan(nn.Sequential(Norm(32), nn.Tanh()), world=2, tp=2, example_inputs=X)
    assert any("nothing is cut over tp=2" in w for w in plan.warnings)


def test_override_keeps_a_module_whole() -> None:
    plan = decoder_plan(overrides={"blocks.0.mlp": "replicate"})
    assert plan.parameters["blocks.0.mlp.up.weight"].tp_dim is None
    assert "override" in plan.parameters["blocks.0.mlp.up.weight"].why
    assert plan.parameters["blocks.1.mlp.up.weight"].tp_dim == 0


def test_override_of_an_unknown_module_lists_near_names() -> None:
    with pytest.raises(UnknownModule, match=r"blocks\.0\.mlp"):
        decoder_plan(overrides={"blocks.0.mpl": "replicate"})
    with pytest.raises(InvalidArgument, match="'colwise' is not known"):
        decoder_plan(overrides={"blocks.0.mlp": "colwise"})


@pytest.mark.parametrize(
    ("world", "degrees"),
    [(8, {"tp": 3}), (8, {"tp": 2, "dp_shard": 3}), (8, {"tp": 2, "dp_shard": 2, "dp_replicate": 1})],
)
def test_degrees_that_do_not_multiply_to_the_world(world: int, degrees: dict[str, int]) -> None:
    with pytest.raises(MeshMismatch, match=f"a world of {world} does not divide"):
        make_plan(Decoder(), world=world, example_inputs=IDS, **degrees)  # type: ignore[arg-type]


def test_mesh_takes_the_smallest_tp_that_fits() -> None:
    roomy, tight = (make_plan(Decoder(), world=4, example_inputs=IDS, memory=m) for m in (80.0, 2e-4))
    assert (roomy.mesh.tp, roomy.mesh.dp_shard) == (1, 4)
    assert tight.mesh.tp > 1
    assert "nothing fits" in tight.why_mesh or "smallest tp" in tight.why_mesh


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


def test_a_branch_on_values_names_its_line() -> None:
    (part,) = Trace(given=X).run(Branches()).untraced
    assert part.where.startswith("test_passes.py:")


def test_the_model_is_left_alone() -> None:
    model = build("decoder")
    before = {n: (id(p), p.detach().clone()) for n, p in model.named_parameters()}
    make_plan(model, world=2, tp=2, example_inputs=IDS)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: i for n, (i, _) in before.items()}
    assert all(torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["decoder", "head norms", "tied", "llama", "qwen3", "gemma2"])
def test_names_take_no_part(name: str) -> None:
    plain, other = build(name), build(name)
    renamed = rename(other, random.Random(0))
    inputs = {"input_ids": IDS[0]} if hasattr(plain, "config") else IDS
    first, second = (make_plan(m, world=4, tp=2, example_inputs=inputs) for m in (plain, other))
    mine = {renamed[fqn]: (t.tp_dim, t.grad_sum, t.read, t.local_shape) for fqn, t in first.parameters.items()}
    assert mine == {fqn: (t.tp_dim, t.grad_sum, t.read, t.local_shape) for fqn, t in second.parameters.items()}
    assert first.collectives == second.collectives
    assert first.coverage.parameter_bytes == second.coverage.parameter_bytes


HASHED = """
import sys, torch
sys.path.insert(0, {tests!r})
from models import build
from autoshard.api import plan
print(plan(build("head norms"), world=4, tp=2, example_inputs=(torch.zeros(2, 7, dtype=torch.long),)).to_json())
"""


def test_the_same_plan_under_any_hash_seed() -> None:
    from pathlib import Path

    code = HASHED.format(tests=str(Path(__file__).parents[1]))
    plans = {
        subprocess.run(
            [sys.executable, "-c", code], env={**__import__("os").environ, "PYTHONHASHSEED": seed},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "4242")
    }  # fmt: skip
    assert len(plans) == 1


def test_analysis_of_a_small_graph_takes_milliseconds() -> None:
    plan, _ = run(build("llama"), Options(world=2, tp=2, example_inputs={"input_ids": IDS[0]}))
    times = {t.name: t.seconds for t in plan.times}
    assert times["factorise"] + times["cut and place"] < 0.25  # milliseconds when quiet; a loaded machine is slower


def test_attention_alone_is_a_region_at_the_root() -> None:
    plan = make_plan(Attention(), world=2, tp=2, example_inputs=X)
    assert plan.modules[""].inputs == {"x": "R->V"}
    assert plan.modules["o"].outputs == {"": "P->R"}
