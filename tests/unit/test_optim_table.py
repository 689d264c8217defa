"""The compatibility table against the installed torch, and trials of optimizers that are not in it."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from train_workers import Lion, ReadsMemory

import autoshard
from autoshard.errors import OptimizerError
from autoshard.optim.made import make_all, split
from autoshard.optim.remap import snapshot
from autoshard.optim.table import NO_OPTION, REFUSED, TABLE, WAYS, WORKS, Support, support_of, way_of
from autoshard.optim.trial import fresh_like, try_out

OFFERED = [
    kind
    for kind in vars(optim).values()
    if isinstance(kind, type) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
]
CELLS = [(support, way) for support in TABLE for way in WAYS if support.verdict(way) != NO_OPTION]
#: Switches that change what a step computes.
VARIANTS: list[tuple[Any, dict[str, Any]]] = [
    (optim.AdamW, {"amsgrad": True, "foreach": True}),
    (optim.Adam, {"amsgrad": True, "fused": True, "maximize": True, "weight_decay": 0.1}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "foreach": True, "lr": 0.1}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1, "maximize": True, "lr": 0.1}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9, "foreach": True}),
    (optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1, "foreach": True}),
    (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "foreach": True}),
    (optim.AdamW, {"lr": torch.tensor(0.01)}),
]


def dims(kind: type[optim.Optimizer]) -> list[int]:
    return [2, 2] if kind is optim.Muon else [0, 1, 2, 3]


def test_every_optimizer_of_torch_has_a_row_and_only_those() -> None:
    assert [support.kind for support in TABLE] == sorted(OFFERED, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("support", TABLE, ids=lambda support: support.kind.__name__)
def test_the_options_are_torchs(support: Support) -> None:
    taken = inspect.signature(support.kind).parameters
    assert (support.foreach != NO_OPTION, support.fused != NO_OPTION) == ("foreach" in taken, "fused" in taken)
    assert bool(support.instead) == (REFUSED in (support.loop, support.foreach, support.fused))


@pytest.mark.parametrize(("support", "way"), CELLS, ids=lambda x: x if isinstance(x, str) else x.kind.__name__)
def test_the_verdict_is_what_a_trial_shows(support: Support, way: str) -> None:
    kind: Any = support.kind
    outcome = try_out(lambda parameters: kind(parameters, **support.options(way)), dims(kind))
    if support.verdict(way) == REFUSED:
        assert outcome.error or outcome.untested
    else:
        assert (outcome.untested, outcome.error, outcome.whole) == ("", "", ())
        assert outcome.difference < (0.1 if support.kind is optim.Muon else 1e-6)


@pytest.mark.parametrize("support", [one for one in TABLE if one.loop == WORKS], ids=lambda x: x.kind.__name__)
def test_the_verdict_on_matrices_cut_in_parts_is_what_a_trial_shows(support: Support) -> None:
    kind: Any = support.kind
    outcome = try_out(lambda parameters: kind(parameters, **support.options("loop")), dims(kind), in_parts=True)
    assert not outcome.untested
    assert ("cut in parts" in outcome.error) == (support.in_parts == REFUSED)
    assert outcome.difference < 1e-6


@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=str)
def test_switches_work_too(kind: Any, options: dict[str, Any]) -> None:
    outcome = try_out(lambda parameters: kind(parameters, **options), [1, 2])
    assert (outcome.untested, outcome.error, outcome.whole) == ("", "", ())
    assert outcome.difference < 1e-6


def test_torch_chooses_foreach_on_an_accelerator() -> None:
    assert [way_of(None, None, False), way_of(None, None, True), way_of(False, None, True)] == [
        "loop",
        "foreach",
        "loop",
    ]
    assert [way_of(True, None, False), way_of(None, True, True), way_of(None, False, False)] == [
        "foreach",
        "fused",
        "loop",
    ]


class Mine(optim.AdamW):
    pass


class KeepsWhole(Lion):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["average"] = torch.zeros(parameter.shape)


class NormOfItsPart(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                grad, own = (x.to_local() if hasattr(x, "to_local") else x for x in (parameter.grad, parameter))
                own.sub_(grad / grad.norm() * group["lr"])


class Dice(Lion):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=group["lr"])


class NeedsMore(Lion):
    def __init__(self, params: Any, model: nn.Module) -> None:
        super().__init__(params)
        self.model = model


class AsksForLoss(Lion):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        loss = closure()
        super().step()
        return loss


def held(kind: Any, **options: Any) -> tuple[nn.Module, optim.Optimizer]:
    model = nn.Linear(3, 3)
    return model, kind(model.parameters(), **options)


@pytest.mark.parametrize("kind", [Lion, Mine, Dice, AsksForLoss])
def test_somebody_elses_optimizer_works(kind: Any) -> None:
    model, optimizer = held(kind, lr=0.0)
    seed, before = torch.get_rng_state(), [parameter.detach().clone() for parameter in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        snapshot(model, [optimizer])
    # the user's own is only read, and so is the state of the generator
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.0
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(seed, torch.get_rng_state())
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (ReadsMemory, r"ReadsMemory does not work[\s\S]*raw memory of a parameter[\s\S]*docs/optimizers\.md"),
        (KeepsWhole, r"KeepsWhole keeps its state whole[\s\S]*average"),
        (NormOfItsPart, r"NormOfItsPart trains something else[\s\S]*a difference of \d\d"),
    ],
)
def test_somebody_elses_optimizer_is_refused_by_what_it_does(kind: Any, match: str) -> None:
    model, optimizer = held(kind)
    with pytest.raises(OptimizerError, match=match):
        snapshot(model, [optimizer])
    snapshot(model, [optimizer], sharded=False)


class MixesRows(Lion):
    """As Muon does: the direction of a matrix is that of its product with itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            gradient = parameter.grad
            parameter.add_(gradient @ gradient.T @ gradient if gradient.dim() == 2 else gradient, alpha=-0.01)


def test_somebody_elses_optimizer_that_mixes_rows_is_refused_where_they_are_in_parts() -> None:
    model, optimizer = held(MixesRows)
    snapshot(model, [optimizer])
    snapshot(model, [optimizer], in_parts={"elsewhere"})
    with pytest.raises(
        OptimizerError,
        match=r"MixesRows does not work on parameters[\s\S]*weight[\s\S]*get_T on a tensor that is cut in parts",
    ):
        snapshot(model, [optimizer], in_parts={"weight"})
    model, optimizer = held(Lion)
    snapshot(model, [optimizer], in_parts={"weight"})


def test_what_cannot_be_tried_is_said() -> None:
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match=r"NeedsMore could not be tried.*TypeError.*model"):
        snapshot(model, [NeedsMore(model.parameters(), model)])


def test_groups_with_the_same_switches_are_tried_as_one() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    groups = [{"params": list(layer.parameters()), "lr": 0.1 / (1 + i)} for i, layer in enumerate(model)]
    make, needed = fresh_like(Mine([*groups[:-1], {**groups[-1], "foreach": True}]))
    assert needed == [1, 2, 1, 2]
    fresh = make([nn.Parameter(torch.zeros(2)) for _ in needed])
    assert [group["foreach"] for group in fresh.param_groups] == [None, True]
    assert isinstance(fresh, Mine)


def test_factories_are_told_from_optimizers() -> None:
    model, optimizer = held(optim.AdamW)

    def factory(named: Any) -> optim.Optimizer:
        return optim.SGD([parameter for _, parameter in named], lr=0.1)

    assert split(None) == ([], [])
    assert split(optimizer) == ([optimizer], [])
    assert split(optim.AdamW) == ([], [optim.AdamW])
    both: list[Any] = [factory, optimizer]
    assert split(iter(both)) == ([optimizer], [factory])
    with pytest.raises(OptimizerError, match="a int is not an optimizer"):
        split([3])  # type: ignore[list-item]
    with pytest.raises(OptimizerError, match="Rprop does not work"):
        split(optim.Rprop)
    assert autoshard.optimizers(model) == []
    make_all(model, [factory, optim.AdamW], sharded=True)
    made = autoshard.optimizers(model)
    assert [type(one) for one in made] == [optim.SGD, optim.AdamW]
    assert made[1].param_groups[0]["params"][0] is model.weight
    assert made[1].param_groups[0]["param_names"] == ["weight", "bias"]


def test_factories_that_make_something_else_are_refused() -> None:
    model = nn.Linear(3, 3)
    elsewhere: list[Tensor] = [nn.Parameter(torch.zeros(2))]
    with pytest.raises(OptimizerError, match="made no optimizer"):
        make_all(model, [lambda named: None], sharded=True)  # type: ignore[list-item, return-value]
    with pytest.raises(OptimizerError, match="without a parameter of the model"):
        make_all(model, [lambda named: optim.SGD(elsewhere, lr=0.1)], sharded=True)
    with pytest.raises(OptimizerError, match="SGD with fused=True"):
        make_all(model, [lambda named: optim.SGD(model.parameters(), lr=0.1, fused=True)], sharded=True)
    with pytest.warns(UserWarning, match="1 parameter that no module"):
        make_all(model, [lambda named: optim.SGD([model.weight, *elsewhere], lr=0.1)], sharded=True)


def test_the_page_shows_the_table() -> None:
    lines = (Path(__file__).parents[2] / "docs" / "optimizers.md").read_text().splitlines()
    for support in TABLE:
        (line,) = [line for line in lines if line.startswith(f"| `{support.kind.__name__}` |")]
        cells = [cell.strip().partition(" ")[0] for cell in line.split("|")[2:5]]
        assert cells == [support.verdict(way) or "-" for way in WAYS]


def test_rows_are_for_the_class_itself() -> None:
    assert support_of(optim.AdamW) is not None
    assert support_of(Mine) is None
    assert WORKS != REFUSED
