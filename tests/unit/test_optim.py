"""Optimizers made before sharding, without processes: parameters are replaced by hand."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from autoshard.errors import NonFiniteGradients, OptimizerError
from autoshard.optim.clip import clip_grad_norm_
from autoshard.optim.remap import snapshot
from autoshard.optim.state import elementwise_keys


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.head(self.mix(self.table(rows))) * self.scale
        return out


def replace_parameters(model: nn.Module, make: Callable[[Tensor], Tensor] = torch.clone) -> None:
    """Give every slot a new parameter, ties kept: what sharding does."""
    new: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False)):
            new.setdefault(id(old), nn.Parameter(make(old.detach()), requires_grad=old.requires_grad))
            setattr(module, name, new[id(old)])


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        rows = torch.arange(6).view(2, 3)
        model(rows).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def two_groups(model: Tied) -> list[dict[str, Any]]:
    return [
        {"params": [model.mix.weight, model.table.weight], "weight_decay": 0.1},
        {"params": [model.mix.bias], "weight_decay": 0.0, "mine": "kept"},
        {"params": [model.scale]},
    ]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_continues_as_if_nothing_had_happened(make: Callable[..., torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    models = [Tied(), Tied()]
    models[1].load_state_dict(models[0].state_dict())
    extra: dict[str, Any] = {"momentum": 0.9} if make is torch.optim.SGD else {}
    optimizers = [make(two_groups(model), lr=0.05, **extra) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer)
    groups = list(map(id, optimizers[1].param_groups))
    lists = [id(group["params"]) for group in optimizers[1].param_groups]

    before = snapshot(models[1], [optimizers[1]])
    before.release()
    assert all(group["params"] == [] for group in optimizers[1].param_groups)
    assert not optimizers[1].state
    replace_parameters(models[1])
    before.restore(models[1])

    assert before.stale() == []
    assert list(map(id, optimizers[1].param_groups)) == groups
    assert [id(group["params"]) for group in optimizers[1].param_groups] == lists
    assert optimizers[1].param_groups[1]["mine"] == "kept"
    assert optimizers[1].param_groups[0]["params"][1] is models[1].head.weight
    for model, optimizer in zip(models, optimizers, strict=True):
        train(model, optimizer)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_without_restore_nothing_trains() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    replace_parameters(model)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    train(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))


def test_named_parameters_defaults_schedulers_and_hooks_survive() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(list(model.named_parameters()), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    calls: list[str] = []
    optimizer.register_step_post_hook(lambda *_: calls.append("step"))
    names, defaults = list(optimizer.param_groups[0]["param_names"]), dict(optimizer.defaults)
    before = snapshot(model, [optimizer])
    before.release()
    replace_parameters(model)
    before.restore(model)
    train(model, optimizer, steps=1)
    scheduler.step()
    assert optimizer.param_groups[0]["param_names"] == names
    assert optimizer.defaults == defaults
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert calls == ["step"]


def test_two_optimizers_and_one_given_twice() -> None:
    model = Tied()
    one = torch.optim.SGD([model.table.weight], lr=0.1)
    other = torch.optim.AdamW(model.mix.parameters(), lr=0.1)
    before = snapshot(model, [one, other, one])
    before.release()
    replace_parameters(model)
    before.restore(model)
    assert one.param_groups[0]["params"][0] is model.table.weight
    assert other.param_groups[0]["params"][1] is model.mix.bias


def test_parameters_outside_the_model_stay_where_they_are() -> None:
    model, loss_head = Tied(), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([model.scale, loss_head, model.mix.bias], lr=0.1)
    (model(torch.arange(3)).sum() + loss_head.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
    with pytest.warns(UserWarning, match=r"AdamW holds 1 parameter that no module.*\(3,\)"):
        before = snapshot(model, [optimizer])
    before.release()
    assert optimizer.param_groups[0]["params"] == [loss_head]
    assert list(optimizer.state) == [loss_head]
    replace_parameters(model)
    before.restore(model)
    entries = optimizer.param_groups[0]["params"]
    assert [a is b for a, b in zip(entries, [model.scale, loss_head, model.mix.bias], strict=True)] == [True] * 3
    assert len(optimizer.state) == 3


def test_module_of_another_class_and_module_that_was_replaced() -> None:
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = snapshot(model, [optimizer])
    before.release()
    model.table.__class__ = type("Changed", (nn.Embedding,), {})
    model.mix = nn.Linear(4, 4)
    before.restore(model)
    assert any(entry is model.mix.weight for entry in optimizer.param_groups[0]["params"])
    # the table was not replaced: alive, but not stale
    assert before.stale() == []


def test_stale_names_who_is_still_alive() -> None:
    model = Tied()
    kept = model.mix.weight
    before = snapshot(model, [])
    before.release()
    replace_parameters(model)
    before.restore(model)
    assert before.stale() == [("mix.weight", 64)]
    del kept
    assert before.stale() == []


def refused(model: nn.Module, optimizer: Any, match: str) -> None:
    with pytest.raises(OptimizerError, match=match):
        snapshot(model, [optimizer])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda p: torch.optim.SGD(p, fused=True), "SGD with fused=True.*\n.*foreach=True"),
        (lambda p: torch.optim.Adagrad(p, fused=True), "Adagrad with fused=True"),
        (torch.optim.Adafactor, "Adafactor does not work.*\n.*AdamW"),
        (torch.optim.Rprop, "Rprop does not work"),
    ],
)
def test_optimizers_that_cannot_be_sharded_are_refused_by_name(make: Any, match: str) -> None:
    model = Tied()
    refused(model, make(model.parameters()), match)
    snapshot(model, [make(model.parameters())], sharded=False)
    elsewhere = make(nn.Linear(2, 2).parameters())
    with pytest.warns(UserWarning, match="no module"):
        snapshot(model, [elsewhere])


def test_hooks_and_state_that_would_be_lost_are_refused() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    weight, bias = cast(Any, model.mix.weight), cast(Any, model.mix.bias)
    handle = weight.register_post_accumulate_grad_hook(lambda _: None)
    refused(model, optimizer, r"1 parameter with gradient hooks[\s\S]*mix\.weight")
    handle.remove()
    handle = bias.register_hook(lambda grad: grad)
    refused(model, optimizer, r"mix\.bias")
    handle.remove()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        snapshot(model, [optimizer])
    refused(model, object(), "not an optimizer")


def test_lbfgs_is_refused_once_it_has_state() -> None:
    model = Tied()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)
    before = snapshot(model, [optimizer])
    before.release()
    replace_parameters(model)
    before.restore(model)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.arange(3)).square().mean()
        loss.backward()
        return loss.item()

    start = model.mix.weight.detach().clone()
    cast(Any, optimizer).step(closure)
    assert not torch.equal(start, model.mix.weight)
    optimizer.zero_grad()
    refused(model, optimizer, "LBFGS has taken a step")


def test_meta_state_is_refused_and_odd_state_is_reported() -> None:
    with torch.device("meta"):
        model = Tied()
    refused(model, torch.optim.Adagrad(model.parameters()), "state without values")
    snapshot(model, [torch.optim.AdamW(model.parameters())])
    real = Tied()
    optimizer = torch.optim.AdamW(real.parameters())
    optimizer.state[real.mix.weight] = {"rows": torch.zeros(4, 1)}
    with pytest.warns(UserWarning, match=r"mix\.weight: rows \(4, 1\)"):
        snapshot(real, [optimizer])


def test_gradients_are_reported() -> None:
    model = Tied()
    model(torch.arange(3)).sum().backward()
    with pytest.warns(UserWarning, match="gradients of 4 parameters are dropped"):
        snapshot(model, [])


def after(model: nn.Module, change: Callable[[], None]) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    before = snapshot(model, [optimizer])
    before.release()
    change()
    before.restore(model)


def test_what_would_train_wrongly_is_refused_at_the_end() -> None:
    model = Tied()
    with pytest.raises(OptimizerError, match=r"tie is broken[\s\S]*table\.weight, head\.weight"):
        after(model, lambda: setattr(model.head, "weight", nn.Parameter(torch.zeros(10, 4))))
    model = Tied()
    with pytest.raises(OptimizerError, match=r"no parameter for this[\s\S]*mix\.bias"):
        after(model, lambda: setattr(model.mix, "bias", None))
    model = Tied()
    with pytest.raises(OptimizerError, match="several parameters of the optimizer became one"):
        after(model, lambda: setattr(model.mix, "bias", model.scale))
    model = Tied()
    with pytest.raises(OptimizerError, match=r"was trainable[\s\S]*scale"):
        after(model, lambda: setattr(model, "scale", nn.Parameter(torch.tensor(1.0), requires_grad=False)))


def test_state_of_another_shape_is_refused() -> None:
    model = Tied()
    optimizer = torch.optim.Adagrad(model.parameters())
    before = snapshot(model, [optimizer])
    before.release()
    replace_parameters(model, lambda old: old[..., :2].clone() if old.dim() else old.clone())
    with pytest.raises(OptimizerError, match=r"\(10, 4\), parameter of shape \(10, 2\)"):
        before.restore(model)


def test_a_cut_of_the_callers_is_used_for_state_of_the_parameters_shape_only() -> None:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    before = snapshot(model, [optimizer])
    before.release()
    replace_parameters(model)
    seen: list[str] = []

    def cut(fqn: str, full: Tensor, parameter: Tensor) -> Tensor:
        assert full.shape == parameter.shape
        seen.append(fqn)
        return full

    before.restore(model, cut)
    # exp_avg and exp_avg_sq of each parameter; the step of the 0-dim one is no moment
    assert sorted(seen) == sorted(2 * ["scale", "table.weight", "mix.weight", "mix.bias"])


def test_dtype_follows_the_parameter_unless_it_was_another() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {"step": torch.tensor(1.0), "a": torch.zeros(4, 4), "b": torch.zeros(4, 4).double()}
    before = snapshot(model, [optimizer])
    before.release()
    replace_parameters(model, lambda old: old.bfloat16())
    before.restore(model)
    assert {key: value.dtype for key, value in optimizer.state[model.weight].items()} == {
        "step": torch.float32,
        "a": torch.bfloat16,
        "b": torch.float64,
    }


def test_only_parameters_with_dims_tell_moments_from_counts() -> None:
    scalar, vector = torch.Size(()), torch.Size((3,))
    values = {"count": torch.tensor(1.0), "moment": torch.zeros(3), "flag": True}
    assert elementwise_keys([(vector, values), (scalar, {"count": torch.tensor(1.0)})]) == frozenset({"moment"})
    assert elementwise_keys([(scalar, {"count": torch.tensor(1.0)})]) is None


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_is_torchs_on_plain_tensors(norm_type: float, foreach: bool | None) -> None:
    def parameters() -> list[nn.Parameter]:
        torch.manual_seed(0)
        made = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 2), (4,), (), (5,))]
        for parameter in made[:3]:
            parameter.grad = torch.randn(parameter.shape)
        return made

    ours, theirs = parameters(), parameters()
    total = clip_grad_norm_(iter(ours), 0.5, norm_type, foreach=foreach)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.5, norm_type, foreach=foreach)
    assert total.dim() == 0 and torch.equal(total, expected)
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        assert one.grad is not None and other.grad is not None and torch.equal(one.grad, other.grad)


def test_clip_of_nothing_one_tensor_and_nan() -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_(parameter, 1.0).item() == 5.0
    assert parameter.grad.norm().item() == pytest.approx(1.0)
    parameter.grad[0] = float("nan")
    assert clip_grad_norm_(parameter, 1.0).isnan()
    with pytest.raises(NonFiniteGradients, match="norm of nan"):
        clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
