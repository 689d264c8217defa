"""The executor in one process: simulated ranks with true values, and collectives counted on the fake group."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from executor_models import Config, Decoder, decoder_plan, loss_of, tensor_plan
from simulate import CountCollectives, fake_world, on_rank, per_rank, same_on_all, seeded, simulated
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard.errors import AutoshardError, InvalidArgument
from autoshard.executor.collectives import Axis, Conversion
from autoshard.executor.execute import apply, ensure_process_group, make_mesh, set_gradient_sync
from autoshard.executor.whole import full_gradients, full_parameters
from autoshard.plans import Coverage, Mesh, ModulePlan, Plan

TP = Mesh(1, 1, 2)


@pytest.mark.parametrize("tp", [2, 4])
def test_runs_in_the_local_tensor_simulation(tp: int) -> None:
    whole, model = Decoder(Config()), Decoder(Config())
    ids = torch.arange(14).view(2, 7) % 11
    loss_of(whole(ids), ids).backward()
    plan = decoder_plan(model, Mesh(1, 1, tp))
    with simulated(tp):
        apply(model, plan, make_mesh(plan, "cpu"))
        set_gradient_sync(model, False)
        loss_of(model(ids), ids).backward()
        set_gradient_sync(model, True)
        loss_of(model(ids), ids).backward()
        gradients = {name: same_on_all(g) for name, g in full_gradients(model).items()}
        parameters = {name: same_on_all(p) for name, p in full_parameters(model).items()}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], 2 * parameter.grad, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(parameters[name], parameter.detach(), rtol=0, atol=0)


def test_four_activation_all_reduces_a_layer_and_one_gradient_sum_a_unit() -> None:
    config = Config(layers=3, scalars=False)
    ids = torch.arange(14).view(2, 7)
    activation = ids.numel() * config.hidden
    with fake_world(2):
        model = Decoder(config)
        plan = decoder_plan(model, TP)
        apply(model, plan, make_mesh(plan, "cpu"))
        with CountCollectives() as forward:
            loss = loss_of(model(ids), ids)
        with CountCollectives() as backward:
            loss.backward()
        set_gradient_sync(model, False)
        with CountCollectives() as kept:
            loss_of(model(ids), ids).backward()
        with torch.no_grad(), CountCollectives() as evaluated:
            model(ids)
    sums = [("allreduce_", 2 * config.head_dim + 1)] * config.layers
    table, head = 1, 1
    reduces = [("allreduce_", activation)]
    assert forward.seen == reduces * (2 * config.layers + table) + [("_allgather_base_", ids.numel() * config.vocab)]
    assert sorted(backward.seen) == sorted(reduces * (2 * config.layers + head) + sums)
    assert kept.count("allreduce_") == len(forward.seen) - 1 + len(backward.seen) - len(sums)
    assert evaluated.seen == forward.seen


@pytest.mark.parametrize("kind", ["R->V", "P->R", "S(1)->R", "R->S(1)", "R->S(-1)", "R->P"])
def test_a_conversion_and_its_gradient(kind: str) -> None:
    """The state of the value decides what each rank is given, and what the whole value is worth."""
    before, after = kind.split("->")
    whole, weight = seeded(3, 4), seeded(3, 4, seed=1)
    with simulated(2) as mode:
        axis = Axis(make_mesh(_plan({}), "cpu")["tp"])
        value = per_rank(*_parts(whole, before)).requires_grad_()
        answer = Conversion.parse(kind)(value, axis)
        gradient = per_rank(*_parts(weight, after, gradient=True))
        answer.backward(gradient)
        assert value.grad is not None
        got = [on_rank(answer, rank).detach() for rank in range(2)]
        back = [on_rank(value.grad, rank) for rank in range(2)]
        del mode
    _assert_same(_joined(got, after), whole)
    _assert_same(_joined(back, {"R": "R", "P": "R"}.get(before, before)), weight)


def _parts(value: Tensor, state: str, gradient: bool = False) -> list[Tensor]:
    """``value`` as two ranks have it; the gradient of P is R, and that of V is P."""
    state = {"P": "R", "V": "P"}.get(state, state) if gradient else state
    if state in ("R", "V"):
        return [value.clone(), value.clone()]
    if state == "P":
        return [0.25 * value, 0.75 * value]
    return [part.clone() for part in value.chunk(2, 1)]


def _joined(parts: list[Tensor], state: str) -> Tensor:
    if state in ("R", "V"):
        _assert_same(parts[0], parts[1])
        return parts[0]
    return parts[0] + parts[1] if state == "P" else torch.cat(parts, 1)


def _assert_same(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def test_an_unknown_conversion_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no conversion is called 'R->Q'"):
        Conversion.parse("R->Q")


class Pair(NamedTuple):
    x: Tensor
    other: int


@dataclasses.dataclass(frozen=True)
class Answer:
    y: Tensor
    kept: Tensor


class Region(nn.Module):
    """Takes its input inside a tuple among ``*args``, answers with a frozen dataclass in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6, bias=False, dtype=torch.float64)
        self.down = nn.Linear(6, 4, bias=False, dtype=torch.float64)

    def forward(self, first: int, *args: Any, **kwargs: Any) -> dict[str, Answer]:
        pair = args[0]
        return {"answer": Answer(self.down(F.silu(self.up(pair.x))), pair.x * first)}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.entry = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.region = Region()

    def forward(self, x: Tensor) -> Tensor:
        pair = Pair(self.entry(x), 3)
        answer = self.region(2, pair, unused=None)["answer"]
        y: Tensor = answer.y + pair.x
        return y


def _plan(modules: dict[str, ModulePlan], model: nn.Module | None = None, cuts: dict[str, int] | None = None) -> Plan:
    plans = {n: tensor_plan(n, p, TP) for n, p in model.named_parameters()} if model is not None else {}
    for name, dim in (cuts or {}).items():
        plans[name] = dataclasses.replace(plans[name], tp_dim=dim, tp_copies=1)
    return Plan(TP, plans, {}, modules, (), {}, (), Coverage(0.0, 0.0))


def test_tensors_inside_containers_are_converted() -> None:
    whole, model, x = Outer(), Outer(), seeded(5, 4)
    whole(x).pow(2).sum().backward()
    region = ModulePlan("region", {"args.0.x": "R->V"}, {"answer.y": "P->R"})
    plan = _plan({"region": region}, model, {"region.up.weight": 0, "region.down.weight": 1})
    with simulated(2):
        apply(model, plan, make_mesh(plan, "cpu"))
        model(x).pow(2).sum().backward()
        gradients = {name: same_on_all(g) for name, g in full_gradients(model).items()}
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        _assert_same(gradients[name], parameter.grad)


class Twice(nn.Module):
    """Parameters whose gradients are one and the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(seeded(3, seed=seed)) for seed in (1, 2))
        self.c = nn.Parameter(seeded(1, 3, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a + self.b + self.c.view(3)) * x


def test_gradients_of_one_sum_do_not_share_memory() -> None:
    whole, model, x = Twice(), Twice(), seeded(3)
    # not by accumulation: torch 2.13 itself lets b and c share memory here
    once = torch.autograd.grad(whole(x).pow(2).sum(), list(whole.parameters()))
    plan = _plan({}, model)
    with fake_world(2):
        apply(model, plan, make_mesh(plan, "cpu"))
        for _ in range(3):
            model(x).pow(2).sum().backward()
        for parameter, gradient in zip(model.parameters(), once, strict=True):
            assert isinstance(parameter.grad, DTensor)
            _assert_same(parameter.grad.to_local(), 3 * gradient)


def test_a_row_number_that_no_rank_has_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(8, 4))
    plan = _plan({"0": ModulePlan("embedding_rowwise", {}, {"": "P->R"}, lookup="input")}, model, {"0.weight": 0})
    with simulated(2):
        apply(model, plan, make_mesh(plan, "cpu"))
        model(torch.tensor([0, 7]))
        for bad in (8, -1):
            with pytest.raises(IndexError):
                model(torch.tensor([0, bad]))


class Recurrent(nn.Module):
    """A layer that keeps a list of its own parameters for its kernel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.LSTM(4, 6, batch_first=True, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)[0]
        return y


def test_a_layer_reads_its_own_list_of_parameters() -> None:
    whole, model, x = Recurrent(), Recurrent(), seeded(2, 3, 4)
    whole(x).pow(2).sum().backward()
    plan = _plan({}, model)
    with simulated(2):
        apply(model, plan, make_mesh(plan, "cpu"))
        for each in (model, copy.deepcopy(model)):
            each(per_rank(x, x)).pow(2).sum().backward()
            gradients = {name: same_on_all(g) for name, g in full_gradients(each).items()}
            for name, parameter in whole.named_parameters():
                assert parameter.grad is not None
                _assert_same(gradients[name], parameter.grad)


def test_a_second_reference_to_a_parameter_is_refused() -> None:
    model = Outer()
    model.region.__dict__["weights"] = {"up": model.region.up.weight}
    plan = _plan({}, model)
    with fake_world(2), pytest.raises(AutoshardError, match="kept in the plain attribute 'weights' too") as caught:
        apply(model, plan, make_mesh(plan, "cpu"))
    assert "region: region.up.weight" in str(caught.value)


def test_a_module_that_is_used_under_two_names() -> None:
    whole, model = (Decoder(Config()) for _ in range(2))
    for each in (whole, model):
        each.blocks[1].feed = each.block(0).feed
    ids = torch.arange(14).view(2, 7)
    loss_of(whole(ids), ids).backward()
    plan = decoder_plan(model, TP)
    with simulated(2):
        apply(model, plan, make_mesh(plan, "cpu"))
        loss_of(model(ids), ids).backward()
        gradients = {name: same_on_all(g) for name, g in full_gradients(model).items()}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


def test_inference_mode() -> None:
    whole, model = Decoder(Config()), Decoder(Config())
    ids = torch.arange(14).view(2, 7)
    plan = decoder_plan(model, TP)
    with simulated(2), torch.inference_mode():
        apply(model, plan, make_mesh(plan, "cpu"))
        _assert_same(same_on_all(model(ids)), whole(ids))


def test_reading_a_parameter_outside_of_a_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    plan = _plan({}, model, {"0.weight": 0})
    with fake_world(2):
        apply(model, plan, make_mesh(plan, "cpu"))
        assert model[0].weight.shape == (3, 4)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        assert type(model[0]).__name__ == "Linear"
        assert isinstance(model[0], nn.Linear)
        assert "Linear(in_features=4" in repr(model)
        with pytest.raises(AttributeError, match="'Linear' object has no attribute 'wieght'"):
            _ = model[0].wieght
        with pytest.raises(AutoshardError, match="parallelized already"):
            apply(model, plan, make_mesh(plan, "cpu"))


def test_a_number_of_ranks_or_a_kind_of_answer_that_was_not_planned() -> None:
    model = Outer()
    region = ModulePlan("region", {"args.0.x": "R->V"}, {"answer.y.0": "P->R"})
    plan = _plan({"region": region}, model)
    with fake_world(4), pytest.raises(AutoshardError, match="the plan is for 2 ranks"):
        apply(model, plan, make_mesh(dataclasses.replace(plan, mesh=Mesh(1, 2, 2)), "cpu"))
    with fake_world(2):
        apply(model, plan, make_mesh(plan, "cpu"))
        with pytest.raises(AutoshardError, match="the plan expects something that has '0' at region, answer"):
            model(seeded(5, 4))


def _changed(plan: Plan, name: str, **fields: Any) -> Plan:
    return dataclasses.replace(
        plan, parameters={**plan.parameters, name: dataclasses.replace(plan.parameters[name], **fields)}
    )


def test_refusals_name_the_first_thing_that_differs() -> None:
    model = Outer()
    plan = _plan({}, model)
    up = "region.up.weight"
    cases = {
        "has no parameter region.upp": dataclasses.replace(plan, parameters={"region.upp": plan.parameters[up]}),
        "is not what the plan was made for": _changed(plan, up, shape=(6, 5)),
        "was frozen when it was planned": _changed(plan, up, trainable=False),
        "the parts do not make up dim 0": _changed(plan, up, tp_parts=((0, 3), (3, 3))),
        "slices are given of a parameter": _changed(plan, up, slices=((0, 6, 2),)),
        "2 copies of a piece over 2 ranks": _changed(plan, up, tp_copies=2),
        "cannot be cut evenly": _changed(plan, up, tp_dim=3, tp_copies=1),
        "no way to read": _changed(plan, "entry.weight", read="twice"),
        "ties region.up.weight to entry.weight": _changed(plan, up, tied_to="entry.weight"),
        "the model has no buffer table": dataclasses.replace(plan, buffers={"table": plan.parameters[up]}),
        "has no module regoin": _plan({"regoin": ModulePlan("region")}, model),
        "has no argument 'y'": _plan({"entry": ModulePlan("region", {"y": "R->V"})}, model),
        "no conversion is called": _plan({"entry": ModulePlan("region", {"input": "R"})}, model),
        "needs one parameter cut on dim 0": _plan({"entry": ModulePlan("x", lookup="input")}, model),
        "shares an argument that it does not": _plan({"entry": ModulePlan("x", share={"input": "h"})}, model),
    }
    with fake_world(2):
        mesh = make_mesh(plan, "cpu")
        for message, bad in cases.items():
            with pytest.raises(AutoshardError, match=message):
                apply(model, bad, mesh)
        model.entry.weight.register_hook(lambda gradient: None)
        with pytest.raises(AutoshardError, match="1 gradient hooks, which would be lost"):
            apply(model, plan, mesh)


def test_without_torchrun_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AutoshardError, match=r"torchrun --nproc-per-node N script\.py"):
        ensure_process_group()


def test_an_unsharded_model_gives_its_own_tensors() -> None:
    model = Outer()
    assert full_parameters(model)["entry.weight"].data_ptr() == model.entry.weight.data_ptr()
    assert set(full_gradients(model).values()) == {None}
