"""What cannot be traced stays whole and is said; all else is planned, and the plan is right."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from models import Mlp
from opaque_models import WIDTH, Answers, Between, BranchingRoot, Broken, HitExperts, Literal, MoeDecoder
from torch import nn

import autoshard
from autoshard.errors import TraceError
from autoshard.passes import trace as tracing
from autoshard.passes.factorise import Factorise
from autoshard.passes.trace import Trace
from autoshard.passes.wrap import Wrap
from autoshard.plans import Plan

X = (torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1)),)
IDS = (torch.arange(14).reshape(2, 7),)
EXPERT_CUTS = {"gate": 0, "up": 0, "down": 1}


def seeded(model: type[nn.Module], *args: object) -> nn.Module:
    torch.manual_seed(0)
    return model(*args)


def plan(model: nn.Module, given: object = None, tp: int = 2) -> Plan:
    return autoshard.plan(model, world=tp, tp=tp, example_inputs=given)


def expert_cuts(made: Plan, experts: str) -> dict[str, int | None]:
    return {name: made.parameters[f"{experts}.{name}.weight"].tp_dim for name in EXPERT_CUTS}


def test_every_expert_is_cut_also_those_that_were_not_hit() -> None:
    model = HitExperts(experts=6, chosen=1)
    with torch.no_grad():
        model.gate.weight[4:] = 0  # the last two lose against whatever is above zero
        model.gate.weight[:4].abs_()
    made = plan(model, (X[0].abs(),))
    assert all(expert_cuts(made, f"experts.{i}") == EXPERT_CUTS for i in range(6))
    assert made.modules["experts.{0-5}"].inputs == {"x": "R->V"}
    assert made.modules["experts.{0-5}.down"].outputs == {"": "P->R"}


def test_the_plan_says_what_could_not_be_traced_and_where() -> None:
    made = plan(seeded(HitExperts), X)
    (refused,) = [r for r in made.refused if "cannot be traced" in r.why]
    assert refused.where.startswith("opaque_models.py:")
    assert any("cannot be traced" in w and "opaque_models.py:" in w for w in made.warnings)
    assert any("one run of the forward" in a for a in made.assumptions)


def test_what_can_be_traced_says_nothing_of_it() -> None:
    made = plan(seeded(Mlp), X)
    assert not any("cannot be traced" in text for text in (*made.warnings, *(r.why for r in made.refused)))
    assert not Trace(given=X).run(Mlp()).untraced


@pytest.mark.parametrize("model", [HitExperts, BranchingRoot, Between])
def test_the_plan_is_right(model: type[nn.Module]) -> None:
    made = seeded(model)
    assert autoshard.verify(made, plan(made, X), example_inputs=X).ok


def test_a_spoiled_expert_is_wrong() -> None:
    model = seeded(HitExperts)
    made = plan(model, X)
    downs = made.modules["experts.{0-3}.down"]
    spoiled = {**made.modules, "experts.{0-3}.down": dataclasses.replace(downs, outputs={})}
    assert not autoshard.verify(model, dataclasses.replace(made, modules=spoiled), example_inputs=X).ok


def test_blocks_around_hit_experts_repeat_and_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = seeded(MoeDecoder, 5)
    lengths: list[int] = []
    once = Trace._once

    def spy(self: Trace, traced: nn.Module, kept: dict[str, int]) -> object:
        lengths.append(len(kept))
        return once(self, traced, kept)

    monkeypatch.setattr(Trace, "_once", spy)
    folded = plan(model, IDS)
    assert all(lengths)
    assert all(expert_cuts(folded, f"blocks.{b}.moe.experts.{e}") == EXPERT_CUTS for b in range(5) for e in range(4))
    assert folded.parameters["blocks.4.attention.q.weight"].tp_dim == 0
    assert autoshard.verify(model, folded, example_inputs=IDS).ok
    monkeypatch.setattr(tracing, "find_repeats", lambda *_: ())
    assert plan(model, IDS) == folded


def test_code_of_the_root_is_kept_out_and_its_blocks_are_planned() -> None:
    made = plan(seeded(BranchingRoot), X)
    scale = made.parameters["scale"]
    assert scale.tp_dim is None
    assert "cannot be traced" in scale.why
    assert "opaque_models.py:" in scale.why
    for i in range(3):
        assert made.parameters[f"blocks.{i}.attention.q.weight"].tp_dim == 0
        assert made.parameters[f"blocks.{i}.moe.down.weight"].tp_dim == 1


def test_code_that_needs_values_is_kept_out_alone() -> None:
    made = plan(seeded(Between), X)
    assert made.parameters["part.weight"].tp_dim is None
    assert made.parameters["first.up.weight"].tp_dim == made.parameters["second.up.weight"].tp_dim == 0
    assert {r.fqn for r in made.refused if "cannot be traced" in r.why} == {"part", "part.weight"}


@pytest.mark.parametrize("model", [HitExperts, BranchingRoot, MoeDecoder])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_inputs_are_found_and_no_values_are_needed(model: type[nn.Module], device: str) -> None:
    with torch.device(device):
        built = model()
    made = plan(built)
    assert made.coverage.parameter_bytes > 0.8
    assert any("made-up values" in a for a in made.assumptions) == (device == "meta")


def test_a_size_in_an_expert_follows_its_cut_or_the_cut_is_given_up() -> None:
    model = seeded(HitExperts)
    model.experts = nn.ModuleList(Literal(WIDTH, 16) for _ in range(4))
    made = plan(model, X)
    assert len({tuple(expert_cuts(made, f"experts.{e}").values()) for e in range(4)}) == 1
    assert autoshard.verify(model, made, example_inputs=X).ok


def test_what_opaque_code_touches_is_blocked() -> None:
    traced = Trace(given=X).run(seeded(HitExperts))
    (op,) = [op for op in traced.ops if op.target == "autoshard.opaque"]
    factored = Factorise().run(traced)
    dims = [dim for name in op.refs() for dim in factored.single(name)]
    assert dims
    assert all(any("cannot be traced" in block.why for block in dim.blocks) for dim in dims if dim.kind == "leaf")


def test_a_unit_is_never_what_some_inputs_leave_out() -> None:
    alone = Trace(given=X).run(seeded(HitExperts))
    assert {f"experts.{e}" for e in range(4)} <= alone.sometimes
    assert Wrap().run(alone) == ("",)
    assert Wrap().run(dataclasses.replace(alone, sometimes=frozenset())) != ("",)
    assert Wrap().run(Trace(given=IDS).run(seeded(MoeDecoder)))[:2] == ("blocks.0", "blocks.1")
    assert Wrap().run(Trace(given=X).run(seeded(BranchingRoot)))[:3] == ("blocks.0", "blocks.1", "blocks.2")


def test_a_forward_that_does_not_run_is_refused() -> None:
    with pytest.raises(TraceError) as error:
        plan(Broken(), X)
    assert (error.value.at or "").startswith("opaque_models.py:")


def test_the_model_is_left_alone() -> None:
    model = seeded(HitExperts)
    before = {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    plan(model, X)
    assert torch.equal(state, torch.get_rng_state())
    assert all(id(p) == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("kind", ["dict", "dataclass", "plain class", "generator"])
def test_answers_of_any_class_are_whole(kind: str) -> None:
    traced = Trace(given=X).run(seeded(Answers, kind))
    assert len(traced.outputs) == 2
    assert not any(output.state for output in traced.outputs)
    made = plan(seeded(Answers, kind), X)
    assert made.parameters["mlp.up.weight"].tp_dim == 0
    assert made.modules["head"].outputs == {"": "S(-1)->R"}
