"""Hand plans under proof: right ones pass, and each seeded fault is found and named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Decoder, Norm, build, hf
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

import autoshard
from autoshard.errors import InvalidArgument, UnknownModule
from autoshard.hand.reader import from_hand
from autoshard.proving.proof import Proof

DECODER = {
    "embedding": "embedding_rowwise",
    "blocks.*.attention.q": "colwise",
    "blocks.*.attention.k": "colwise",
    "blocks.*.attention.v": "colwise",
    "blocks.*.attention.o": "rowwise",
    "blocks.*.mlp.gate": "colwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "colwise_gather_output",
}


def verify(model: nn.Module, plan: Mapping[str, Any], *inputs: Tensor, tp: int = 2) -> Proof:
    return autoshard.verify(model, plan, tp=tp, example_inputs=inputs or None)


def named(proof: Proof) -> set[tuple[str, str]]:
    assert not proof.ok
    return {(culprit.kind, culprit.fqn) for culprit in proof.culprits}


def ids(length: int = 8) -> Tensor:
    return torch.randint(0, 24, (2, length), generator=torch.Generator().manual_seed(0))


def x() -> Tensor:
    return torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))


class FusedAttention(nn.Module):
    """Queries, keys and values in one projection, laid end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return y


class FusedMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(32, 96), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Experts(nn.Module):
    """Every token goes through every expert, weighted: what matters here is where the sum over ranks stands."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) * 0.2) for shape in ((48, 32), (32, 48)))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        inner = F.silu(torch.einsum("bsd,efd->besf", x, self.up))
        outer = torch.einsum("besf,edf->bsed", inner, self.down)
        return (outer * weights[..., None]).sum(2)


class Moe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router, self.experts = Norm(32), nn.Linear(32, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        weights = self.router(y).softmax(-1)
        out: Tensor = x + self.experts(y, torch.arange(4), weights)
        return out


class DeferredMoe(Moe):
    """The residual is added outside, so that a sum over ranks may wait until the block's end."""

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        out: Tensor = self.experts(x, torch.arange(4), weights)
        return out


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(32, 32), inner

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        out: Tensor = y + self.inner(y)
        return out


MOE = {"experts.up": "colwise", "experts.down": "rowwise", "experts": "moe_tp_experts"}


@pytest.mark.parametrize(("tp", "heads"), [(2, 4), (4, 8)])
def test_a_right_plan_passes(tp: int, heads: int) -> None:
    proof = verify(Decoder(layers=1, heads=heads, kv_heads=heads), DECODER, ids(), tp=tp)
    assert proof.ok, proof
    assert len(proof.parameters) == len(dict(Decoder(layers=1).named_parameters()))
    assert proof.tp == tp


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma2", "Mixtral"])
def test_transformers_own_plans_pass(kind: str) -> None:
    options = {"num_local_experts": 4} if kind == "Mixtral" else {}
    model: Any = hf(kind, use_cache=False, **options)
    proof = verify(model, model.tp_plan)
    assert proof.ok, proof


def test_a_ragged_head_dim_is_a_finding() -> None:
    proof = verify(Decoder(vocab=25, layers=1), DECODER, ids())
    assert ("size", "head.weight") in named(proof)


def test_norms_over_heads_without_a_rule() -> None:
    model: Any = hf("Qwen3", use_cache=False)
    plan = {p: s for p, s in model.tp_plan.items() if not p.endswith("_norm")}
    assert len(plan) < len(model.tp_plan)
    assert named(verify(model, plan)) == {
        ("gradient sum", f"model.layers.{layer}.self_attn.{name}_norm.weight") for layer in (0, 1) for name in "qk"
    }


@pytest.mark.parametrize(
    ("model", "plan", "fused"),
    [
        (FusedAttention, {"inner.qkv": "colwise", "inner.out": "rowwise"}, "inner.qkv"),
        (FusedMlp, {"inner.gate_up": "colwise", "inner.down": "rowwise"}, "inner.gate_up"),
    ],
)
def test_a_cut_across_the_parts_of_a_fused_projection(model: type[nn.Module], plan: dict[str, str], fused: str) -> None:
    found = named(verify(Around(model()), plan, x()))
    assert ("part", f"{fused}.weight") in found
    assert {kind for kind, _ in found} == {"part"}


def test_a_cut_of_each_half_is_right() -> None:
    plan = {"inner.gate_up": "packed_colwise", "inner.down": "rowwise"}
    model = Around(FusedMlp())
    model.inner.gate_up = nn.Linear(32, 96, bias=False)  # the style cuts a bias across its halves
    proof = verify(model, plan, x())
    assert proof.ok, proof


def test_a_tie_of_which_one_name_is_cut() -> None:
    plan = {"embedding": "embedding_rowwise"}
    assert named(verify(Decoder(tied=True, layers=1), plan, ids())) == {("tie", "embedding.weight")}
    both = {**plan, "head": "colwise_gather_output"}
    assert verify(Decoder(tied=True, layers=1), both, ids()).ok


def stock(**changes: ParallelStyle | None) -> dict[str, ParallelStyle | None]:
    """Sequence parallelism with torch's own styles; ``changes`` replaces a rule by the last step of its pattern."""
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm1": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **{f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"},
        "blocks.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.norm2": SequenceParallel(),
        "blocks.*.mlp": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return {pattern: changes.get(pattern.split(".")[-1], style) for pattern, style in plan.items()}


def test_stock_styles_are_applied_as_they_are() -> None:
    proof = verify(Decoder(layers=1), stock(), ids())
    assert proof.ok, proof


def test_a_plain_norm_in_a_sequence_parallel_region() -> None:
    assert named(verify(Decoder(layers=1), stock(norm2=None), ids())) == {("gradient sum", "blocks.0.norm2.weight")}


def test_stock_styles_untie_an_embedding() -> None:
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    assert ("tie", "embedding.weight") in named(verify(Decoder(tied=True, layers=1), plan, ids()))
    assert verify(Decoder(layers=1), plan, ids()).ok


def test_names_and_stock_styles_in_one_plan() -> None:
    plan: dict[str, Any] = {p: s for p, s in DECODER.items() if ".mlp." not in p}
    plan |= {"blocks.*.mlp.gate": ColwiseParallel(), "blocks.*.mlp.up": ColwiseParallel()}
    assert verify(Decoder(layers=1), {**plan, "blocks.*.mlp.down": RowwiseParallel()}, ids()).ok
    assert not verify(Decoder(layers=1), plan, ids()).ok


def test_a_deferred_sum_needs_the_whole_router_summed() -> None:
    assert verify(Around(Moe()), {f"inner.{p}": s for p, s in MOE.items()}, x()).ok
    deferred = {"inner.experts.up": "colwise", "inner.experts.down": "rowwise", "inner": "moe_tp_experts"}
    found = named(verify(Around(DeferredMoe()), deferred, x()))
    assert found == {("gradient sum", "inner.router.weight"), ("gradient sum", "inner.router.bias")}


def test_routing_weights_that_enter_without_a_sum() -> None:
    plan = {"inner.experts.up": "colwise", "inner.experts.down": "rowwise", "inner.experts": "all_reduce"}
    found = named(verify(Around(Moe()), plan, x()))
    assert {kind for kind, _ in found} == {"entry"}


def test_a_missing_reduce() -> None:
    plan = {**DECODER, "blocks.*.mlp.down": "replicate"}
    assert {kind for kind, _ in named(verify(Decoder(layers=1), plan, ids()))} == {"size"}


class NormedTable(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.rms_norm(super().forward(input), (32,))


def test_a_table_that_norms_its_rows() -> None:
    model = Decoder(layers=1)
    model.embedding = NormedTable(24, 32)
    assert named(verify(model, DECODER, ids())) == {("nonlinear", "embedding")}


def test_what_cannot_be_applied_yet_is_said() -> None:
    plan = {"inner.experts.up": "grouped_gemm", "inner.experts": "ep_dispatch_experts"}
    proof = verify(Around(Moe()), plan, x())
    assert {kind for kind, _ in named(proof)} == {"not applied"}
    assert "not judged" in str(proof)


def test_unknown_names_are_passed_over() -> None:
    hand = from_hand(Decoder(), {**DECODER, "blocks.*.mlp.gate": "diagonal", "blocks.*.mixer": "colwise"}, tp=2)
    assert any("diagonal" in note for note in hand.notes)
    assert any("blocks.*.mixer" in note for note in hand.notes)
    assert hand.plan.parameters["blocks.0.mlp.gate.weight"].tp_dim is None
    assert hand.plan.parameters["blocks.0.mlp.up.weight"].tp_dim == 0


def test_a_plan_that_names_nothing_is_refused() -> None:
    with pytest.raises(UnknownModule, match="none of the 1 rules"):
        verify(Decoder(), {"model.layers.*.q_proj": "colwise"})
    with pytest.raises(InvalidArgument, match="for a style"):
        verify(Decoder(), {"head": 3})


def test_it_stays_out_of_the_users_model() -> None:
    model = build("decoder")
    before = dict(model.named_parameters())
    assert verify(model, DECODER, ids()).ok
    assert all(p is before[name] and p.grad is None for name, p in model.named_parameters())


class ScaledAttention(FusedAttention):
    """A scale for each head, as a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y: Tensor = F.scaled_dot_product_attention(q, k, v) * self.scale[:, None, None]
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


def test_a_parameter_with_an_entry_for_each_head() -> None:
    plan = {**{f"inner.{name}": "colwise" for name in "qkv"}, "inner.out": "rowwise"}
    model = Around(ScaledAttention())
    del model.inner.qkv
    proof = verify(model, plan, x())
    assert (proof.culprits[0].kind, proof.culprits[0].fqn) == ("size", "inner.scale")
    assert "test_verify_hand.py" in proof.culprits[-1].where
    assert verify(model, {**plan, "inner.scale": "colwise"}, x()).ok
