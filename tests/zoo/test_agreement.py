"""The yardsticks of the sweep: bytes moved, agreement with a hand plan, which weights count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from models import Decoder
from torch import Tensor, nn

from autoshard.api import plan as make_plan
from autoshard.pipeline import Stages
from autoshard.plans import ModulePlan, Plan, TensorPlan
from zoo.agreement import agreement, covers
from zoo.measure import planned
from zoo.moved import moved_bytes
from zoo.rows import Agreement, Left, Row
from zoo.weights import cut_share, matmul_weights, traced_parameters

IDS = (torch.zeros(2, 7, dtype=torch.long),)
MLP = ("blocks.0.mlp.gate", "blocks.0.mlp.up", "blocks.0.mlp.down")


@cache
def decoder() -> tuple[Plan, Stages]:
    return planned(Decoder(layers=1), IDS)


def without_mlp() -> Plan:
    pinned = dict.fromkeys(MLP, "replicate")
    return make_plan(Decoder(layers=1), world=2, tp=2, example_inputs=IDS, overrides=pinned)


def turned(plan: Plan, name: str, dim: int | None) -> Plan:
    return replace(plan, parameters={**plan.parameters, name: replace(plan.parameters[name], tp_dim=dim)})


def joined(plan: Plan, more: Mapping[str, ModulePlan]) -> Plan:
    return replace(plan, modules={**plan.modules, **more})


def test_moved_bytes_are_the_plans_own_at_the_traced_sizes() -> None:
    model = Decoder(layers=2)
    plan = make_plan(model, world=2, tp=2, example_inputs=IDS, batch=2, sequence=7)
    _, stages = planned(model, IDS)
    counted = sum(c.bytes for c in plan.collectives if c.what == "activation")
    assert moved_bytes(plan, stages.traced) == counted > 0
    fewer = replace(plan, modules={k: m for k, m in plan.modules.items() if m.style != "rowwise"})
    assert moved_bytes(fewer, stages.traced) < counted


def test_one_value_enters_once() -> None:
    plan, stages = decoder()
    entry = {"input": "R->V"}
    apart = {f"blocks.0.attention.{name}": ModulePlan("colwise", entry) for name in "qkv"}
    kept = {k: m for k, m in plan.modules.items() if not k.startswith("blocks.0.attention") or k.endswith(".o")}
    assert moved_bytes(replace(plan, modules={**kept, **apart}), stages.traced) == moved_bytes(plan, stages.traced)


def test_a_part_of_a_value_counts_in_part() -> None:
    _, stages = decoder()
    whole, part = (
        moved_bytes(joined(replace(decoder()[0], modules={}), {"head": ModulePlan("", {"input": kind})}), stages.traced)
        for kind in ("R->V", "R->V[8:16]")
    )
    assert whole == 4 * part > 0


def test_verdicts() -> None:
    plan, stages = decoder()
    less = without_mlp()

    def verdict(ours: Plan, hand: Plan) -> str:
        return agreement(ours, hand, stages.traced).verdict

    assert verdict(plan, plan) == "same"
    assert verdict(plan, less) == "better"
    assert verdict(less, plan) == "worse"
    other, another = (turned(less, f"blocks.0.mlp.{name}.weight", 0) for name in ("up", "gate"))
    assert verdict(other, another) == "different"
    assert verdict(turned(plan, "head.weight", 1), plan) == "different"
    calls = [call.fqn for call in stages.traced.calls if call.fqn not in plan.modules and "" in call.outputs]
    dear = joined(plan, {calls[0]: ModulePlan("", {}, {"": "P->R"})})
    assert (verdict(dear, plan), verdict(plan, dear)) == ("worse", "better")
    more = {fqn: ModulePlan("", {}, {"": "P->R"}) for fqn in calls}
    assert verdict(joined(plan, more), replace(less, modules={})) == "different"


def test_a_plan_covers_another_whatever_the_dims() -> None:
    plan, less = decoder()[0], without_mlp()
    assert covers(turned(plan, "head.weight", 1), plan)
    assert covers(plan, less)
    assert not covers(less, plan)


def test_a_parting_names_the_plans_own_reason() -> None:
    plan, stages = decoder()
    found = agreement(without_mlp(), plan, stages.traced)
    assert "`blocks.0.mlp.gate.weight`" in found.why
    assert "the override 'blocks.0.mlp.gate' keeps it whole" in found.why
    assert found.cut_bytes < found.hand_cut_bytes


class Partly(nn.Module):
    """A weight that no forward uses, one that no matmul takes, and one that a matmul takes transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.added, self.turned = (nn.Parameter(torch.randn(8, 8)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.added) @ self.turned.t()


def test_weights_of_traced_matmuls() -> None:
    _, stages = planned(Partly(), (torch.zeros(3, 8, 8),))
    assert traced_parameters(stages.traced) == {"added", "turned"}
    assert matmul_weights(stages.factored) == {"turned"}


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({"tp_dim": 0}, 1.0),
        ({"tp_dim": None}, 0.0),
        ({"tp_dim": None, "read": "slice", "slice_dim": 0, "slices": ((0, 6, 2), (6, 2, 1))}, 0.75),
    ],
)
def test_a_weight_read_in_slices_is_cut_in_part(fields: dict[str, object], share: float) -> None:
    tensor = TensorPlan((8, 4), "float32", None, None, 1, None, None, (8, 4), "")
    assert cut_share(replace(tensor, **fields)) == share  # type: ignore[arg-type]


def test_rows_survive_their_file() -> None:
    row = Row(
        "llama", "planned", matmuls=0.5, unknown=(("aten.histc", 2),), left=(Left("a.{0-1}", 0.1, "it | is"),),
        opaque=("m: why",), untraced=(Left("b", 0.2, "unused"),), agreement=Agreement("worse", "why", 1, 2, 3, 4),
    )  # fmt: skip
    assert Row.from_json(row.to_json()) == row
    assert "\n" not in row.to_json()
