"""Arguments that are rewritten: the smallest change, on one module's own code, right at other lengths and modes."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import rewritten
import torch
from models import build
from rewritten import (
    Conv1D,
    Counted,
    Eager,
    Flash,
    Given,
    Helped,
    Inner,
    Qkv,
    Relative,
    Repeated,
    Shaped,
    Single,
    Transposed,
    from_text,
)
from simulate import fake_world
from torch import Tensor, nn

import autoshard
from autoshard.errors import InvalidArgument, PlanMismatch
from autoshard.executor.execute import apply, make_mesh
from autoshard.executor.settings import check_attributes
from autoshard.executor.training import Training
from autoshard.passes.cut import ChooseCuts
from autoshard.passes.factorise import Factorise
from autoshard.passes.occurrence import Occurrences
from autoshard.passes.place import Place
from autoshard.passes.resize import Resize
from autoshard.passes.trace import Trace
from autoshard.plans import Plan, Refusal
from autoshard.rewrite import pickled
from autoshard.rewrite.pickled import install
from autoshard.rewrite.record import CallRewrite
from autoshard.rewrite.source import NoSource

X = (torch.randn(2, 6, 32),)
LONGER = (torch.randn(3, 9, 32),)


def planned(model: nn.Module) -> Plan:
    return autoshard.plan(model, world=2, tp=2, example_inputs=X)


def changes(plan: Plan) -> list[str]:
    return [f"{r.function}: {r.before} -> {r.after}" for m in plan.modules.values() for r in m.rewrites]


HALF = "forward: self.n_head -> self.n_head // 2"
SHAPE = "forward: shape -> (*shape[:2], shape[2] // 2, *shape[3:])"
RIGHT: dict[str, tuple[Callable[[], nn.Module], dict[str, int], list[str]]] = {
    "flash": (Flash, {"n_embd": 16}, [HALF, HALF, HALF, "forward: C -> C // 2"]),
    "eager": (Eager, {"n_embd": 16}, [HALF, "forward: C -> C // 2"]),
    "transposed": (
        Transposed,
        {},
        ["forward: WIDTH -> WIDTH // 2", "forward: HEADS -> HEADS // 2", "forward: WIDTH -> WIDTH // 2"],
    ),
    "relative": (Relative, {"n_heads": 2, "inner_dim": 16}, []),
    "helped": (Helped, {}, ["forward > split_heads: HEADS -> HEADS // 2"]),
    "inner": (Inner, {}, ["forward: HEADS -> HEADS // 2"]),
    "repeated": (Repeated, {}, ["forward: HEADS -> HEADS // 2"]),
    "shaped": (Shaped, {}, [SHAPE, SHAPE, "_Shaped__heads: HEADS -> HEADS // 2"]),
    "single": (
        Single,
        {"n_embd": 16},
        ["forward: q @ k.mT -> convert('R->V', q @ k.mT)", "heads: self.n_embd // self.n_head -> -1"],
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_the_arguments_at_fault_are_rewritten_and_the_plan_is_exact_at_other_lengths(name: str) -> None:
    make, attributes, expected = RIGHT[name]
    plan = planned(make())
    assert changes(plan) == expected
    assert dict(plan.modules[""].attributes) == attributes
    assert plan.coverage.matmul_flops == 1
    assert Plan.from_dict(plan.to_dict()) == plan
    proof = autoshard.verify(make(), plan, example_inputs=LONGER)
    assert proof.ok, proof


def test_one_line_is_cut_for_one_module_and_whole_for_another() -> None:
    plan = planned(Transposed())
    assert plan.modules["c_attn"].attributes == {"nf": 48}
    assert not plan.modules["c_proj"].attributes


def test_the_report_says_that_the_code_is_rewritten() -> None:
    text = str(planned(Helped()))
    assert "the code is rewritten: 1 arguments of calls" in text
    assert "HEADS -> HEADS // 2" in text


@pytest.mark.parametrize(("name", "lost"), [("flash", 0), ("helped", 0), ("single", 1)])
def test_a_plan_that_lost_a_rewrite_fails(name: str, lost: int) -> None:
    make = RIGHT[name][0]
    data = planned(make()).to_dict()
    rewrites = data["modules"][""]["rewrites"]
    data["modules"][""]["rewrites"] = [*rewrites[:lost], *rewrites[lost + 1 :]]
    assert not autoshard.verify(make(), data, example_inputs=X).ok


class Twice(Qkv):
    """One argument that must be cut for q and k, and whole for what is made of the input."""

    def heads(self, t: Tensor) -> Tensor:
        return t.view(t.shape[0], -1, rewritten.HEADS, 8)

    def forward(self, x: Tensor) -> Tensor:
        whole = self.heads(x).cumsum(2).flatten(2)
        return self.attend(*(self.heads(p(x)).transpose(1, 2) for p in (self.q, self.k, self.v))) + whole


def stuck(model: nn.Module) -> list[Refusal]:
    """Return what resizing refuses of the first cuts."""
    traced = Trace(X).run(model)
    placed = Place().run(ChooseCuts(2, {}, {}).run(Occurrences(Factorise().run(traced))))
    return list(Resize(X).run(model, placed)[1].values())


@pytest.mark.parametrize(
    ("make", "where", "why"),
    [
        (from_text, "<made>:4", "cannot be rewritten for one module"),
        (Given, "rewritten.py:", "cannot be rewritten for one module"),
        (Twice, "test_rewrite.py:", "one argument would have to be two numbers"),
    ],
)
def test_what_cannot_be_rewritten_is_refused_with_its_line(make: Callable[[], nn.Module], where: str, why: str) -> None:
    refused = stuck(make())
    assert refused
    assert all(r.where.startswith(where) and why in r.why and "4, needed 2" in r.why for r in refused), refused
    plan = planned(make())
    assert not changes(plan)
    assert autoshard.verify(make(), plan, example_inputs=X).ok


def test_a_size_that_must_be_whole_stops_the_cuts_that_its_attribute_is_set_for() -> None:
    why = "one argument would have to be two numbers"
    assert [(r.fqn, why in r.why, "16, needed 32" in r.why) for r in stuck(Counted())] == [("v.weight", True, True)]
    plan = planned(Counted())
    assert all(one.tp_dim is not None for one in plan.parameters.values())
    assert not any("-1" in change for change in changes(plan))
    assert autoshard.verify(Counted(), plan, example_inputs=X).ok


def of_a_rank() -> Flash:
    """Return an attention whose projections are a rank's share, with the code that follows."""
    model = Flash(dropout=0.5)
    model.c_attn, model.c_proj = nn.Linear(32, 48), nn.Linear(16, 32)
    model.n_embd = 16
    install(model, planned(Flash()).modules[""].rewrites)
    return model


def share(model: Flash) -> Flash:
    """Return the same module as its author would have written it for half of the heads."""
    other = Halved(dropout=0.5)
    other.c_attn, other.c_proj, other.n_head, other.n_embd = model.c_attn, model.c_proj, 2, 16
    return other


class Halved(Flash):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=2))
        dropout = self.dropout if self.training else 0.0
        y = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("train", [True, False])
def test_a_rewritten_module_keeps_its_modes_keys_class_and_hooks(train: bool) -> None:
    model = of_a_rank().train(train)
    by_hand = share(model).train(train)
    assert type(model) is Flash
    assert list(model.state_dict()) == list(Flash().state_dict())
    seen: list[int] = []
    model.register_forward_hook(lambda *_: seen.append(1))
    for batch, length in [(1, 3), (4, 11)]:
        x = torch.randn(batch, length, 32)
        torch.manual_seed(0)
        got = model(x)
        torch.manual_seed(0)
        torch.testing.assert_close(got, by_hand(x))
    assert len(seen) == 2


def test_a_rewritten_module_is_compiled_and_copied() -> None:
    model = of_a_rank().eval()
    x = torch.randn(2, 5, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    other = copy.deepcopy(model)
    other.c_proj.bias.data.fill_(1.0)
    torch.testing.assert_close(other(x) - model(x), (1.0 - model.c_proj.bias).expand(2, 5, 32))
    assert other.forward.__self__ is other  # type: ignore[attr-defined]


class Static(Flash):
    """Its sizes are in a function that is no method, and it may save a state of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.attend(self.c_attn(x), self.n_embd))  # type: ignore[no-any-return]

    @staticmethod
    def attend(qkv: Tensor, width: int) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in qkv.split(width, dim=2))
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def static() -> Static:
    model = Static()
    model.c_attn, model.c_proj, model.n_embd = nn.Linear(32, 48), nn.Linear(16, 32), 16
    (place,) = [i for i, text in enumerate(inspect.getsource(Static.attend).splitlines()) if "(4, 8)" in text]
    line = inspect.getsourcelines(Static.attend)[1] + place
    column = inspect.getsourcelines(Static.attend)[0][place].index("4, 8")
    install(model, (CallRewrite("attend", f"test_rewrite.py:{line}", column, "4", "4 // 2"),))
    return model


def saved(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded: nn.Module = torch.load(stream, weights_only=False)
    return loaded


@pytest.mark.parametrize("make", [of_a_rank, static])
@pytest.mark.parametrize(
    "again", [lambda m: pickle.loads(pickle.dumps(m)), saved, copy.deepcopy], ids=["pickle", "save", "copy"]
)
def test_a_pickle_comes_back_with_the_rewritten_code(
    make: Callable[[], Flash], again: Callable[[nn.Module], nn.Module]
) -> None:
    model, x = make().eval(), torch.randn(2, 5, 32)
    model.of_a_rank = of_a_rank  # type: ignore[assignment]
    other = again(again(model))
    assert other.of_a_rank is of_a_rank
    assert type(other) is type(model) and torch.equal(other(x), model(x))
    with torch.no_grad():
        other.c_proj.bias.fill_(7.0)
    assert not torch.equal(other(x), model(x))


def test_a_pickle_without_its_methods_would_run_the_old_code(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_a_rank().eval()
    monkeypatch.setattr(pickled, "install", lambda *_: None)
    with pytest.raises(AttributeError, match="rewritten for a rank"):
        pickle.loads(pickle.dumps(model))


def test_a_pickle_of_other_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(of_a_rank())
    monkeypatch.setattr(Flash, "forward", Eager.forward)
    with pytest.raises(PlanMismatch, match="the code of a pickled module") as caught:
        pickle.loads(data)
    assert "state_dict" in str(caught.value)


def test_a_pickle_that_would_lose_a_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Static, "__getstate__", lambda self: (1, dict(self.__dict__)), raising=False)
    with pytest.raises(pickle.PicklingError, match=r"save model\.state_dict"):
        pickle.dumps(static())


@pytest.mark.parametrize("mode", ["none", "full"])
def test_a_whole_sharded_model_is_unpickled(mode: str) -> None:
    model, ids = build("nano").eval(), torch.zeros(2, 6, dtype=torch.long)
    plan = autoshard.plan(model, 2, tp=2, example_inputs=(ids,))
    assert any(one.rewrites for one in plan.modules.values())
    with fake_world(2):
        apply(model, plan, make_mesh(plan, "cpu"), training=Training(checkpointing=mode))
        other = pickle.loads(pickle.dumps(model))
        assert torch.equal(other(ids), model(ids))
        for module in other.modules():
            assert all(value.__self__ is module for value in vars(module).values() if inspect.ismethod(value))


def test_other_instances_keep_the_code() -> None:
    of_a_rank()
    assert Flash()(X[0]).shape == X[0].shape


def changed(**fields: Any) -> Plan:
    """Return a plan whose first rewrite says something else."""
    plan = planned(Helped())
    root = plan.modules[""]
    one = dataclasses.replace(root.rewrites[0], **fields)
    return dataclasses.replace(plan, modules={**plan.modules, "": dataclasses.replace(root, rewrites=(one,))})


@pytest.mark.parametrize(
    "fields",
    [
        {"before": "WIDTH"},
        {"where": "rewritten.py:1"},
        {"where": "other.py:116"},
        {"column": 3},
        {"function": "backward"},
    ],
)
def test_code_that_reads_otherwise_is_refused(fields: dict[str, Any]) -> None:
    check_attributes(Helped(), changed())
    with pytest.raises(PlanMismatch, match="code that the module does not have"):
        check_attributes(Helped(), changed(**fields))


@pytest.mark.parametrize("after", ["print()", "HEADS.bit_length()", "HEADS * 2", "(", "WIDTH // 2", "-HEADS"])
def test_a_plan_cannot_make_a_model_run_other_code(after: str) -> None:
    data = planned(Helped()).to_dict()
    data["modules"][""]["rewrites"][0]["after"] = after
    with pytest.raises(InvalidArgument, match="not well formed"):
        Plan.from_dict(data)


def test_a_function_without_source_is_named() -> None:
    one = CallRewrite("forward", "<made>:4", 0, "HEADS", "HEADS // 2")
    with pytest.raises(NoSource, match="there is no source of forward"):
        install(from_text(), (one,))
    with pytest.raises(NoSource, match="no function of the module's class"):
        install(Conv1D(4, 4), (dataclasses.replace(one, function="backward"),))
