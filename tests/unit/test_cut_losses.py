"""Losses inside the model: on logits that stay cut where they can, on gathered ones else; what proves it, and costs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from losses_models import GATHERED, MODELS, Nano, batch, make
from rows import few
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from autoshard import verify
from autoshard._torch import lift
from autoshard.api import plan as make_plan
from autoshard.errors import InvalidArgument
from autoshard.executor import cross_entropy as kernel
from autoshard.executor.collectives import Axis, Conversion
from autoshard.executor.cut_logits import CutLogits, hand_out
from autoshard.plans import ModulePlan, Plan
from autoshard.proving.simulate import on_each_rank, simulated


@functools.cache
def planned(name: str, tp: int = 2, logits: str = "whole") -> Plan:
    model = make(name)
    return make_plan(model, tp, tp=tp, example_inputs=batch(model), logits=logits, batch=4, sequence=8)


def proven(name: str, plan: Plan) -> bool:
    model = make(name)
    return verify(model, plan, example_inputs=batch(model)).ok


def converted(plan: Plan) -> set[str]:
    """How the gathers over the last dim are made."""
    texts = [text for module in plan.modules.values() for text in module.outputs.values()]
    texts += [one.after.split("'")[1] for module in plan.modules.values() for one in module.rewrites if one.converts]
    return {text for text in texts if text.startswith("S(-1)")}


def respoken(plan: Plan, kind: str) -> Plan:
    """The plan with its head converted otherwise."""
    modules: dict[str, ModulePlan] = dict(plan.modules)
    (head,) = [fqn for fqn, module in modules.items() if any("->L" in text for text in module.outputs.values())]
    modules[head] = replace(modules[head], outputs={"": kind})
    return replace(plan, modules=modules)


# --- it fires ---


@pytest.mark.parametrize(
    ("name", "tp"),
    few(
        [*((name, 2) for name in MODELS), ("within", 4), ("nano", 4), ("mean", 4), ("none", 4)],
        [("nano", 2), ("mean", 2), ("within", 2), ("llama", 2), ("none", 4)],
    ),
)
def test_the_loss_is_computed_on_the_shares(name: str, tp: int) -> None:
    plan = planned(name, tp)
    assert converted(plan) == {"S(-1)->L"}
    assert plan.cuts_losses and not plan.cuts_logits
    assert proven(name, plan)


@pytest.mark.parametrize("name", few(["nano", "llama", "gemma2"], 1))
def test_logits_may_be_returned_cut_beside_it(name: str) -> None:
    plan = planned(name, logits="sharded")
    assert converted(plan) == {"S(-1)->LD"}
    assert plan.cuts_losses and plan.cuts_logits
    assert any("logits" in text or text.startswith("0 is") for text in plan.assumptions if "DTensor" in text)
    assert proven(name, plan)


def test_a_model_that_returns_its_loss_alone_is_not_refused() -> None:
    plan = planned("mean", logits="sharded")
    assert converted(plan) == {"S(-1)->L"} and not plan.cuts_logits


def test_no_target_that_counts() -> None:
    model = make("sum")
    ids, targets = batch(model)
    assert verify(model, planned("sum"), example_inputs=(ids, torch.full_like(targets, -100))).ok


def test_the_report_says_so() -> None:
    text = " ".join(str(planned("nano")).split())
    assert "out: S(-1)->L" in text and "the loss works on each rank's part of it" in text
    assert "L (LD) logits whose cross-entropy is computed on each rank's part" in text
    assert "L (LD)" not in str(planned("judged"))


@pytest.mark.parametrize("name", ["nano", "within"])
def test_a_plan_survives_its_file(name: str) -> None:
    plan = planned(name)
    assert Plan.from_dict(plan.to_dict()) == replace(plan, times=())


def test_a_plan_with_the_gather_written_in_again_gathers() -> None:
    plan = respoken(planned("nano"), "S(-1)->R")
    assert not plan.cuts_losses and proven("nano", plan)


# --- it leaves the rest alone ---


@pytest.mark.parametrize("name", GATHERED)
def test_a_loss_of_another_kind_gathers(name: str) -> None:
    plan = planned(name)
    assert converted(plan) == {"S(-1)->R"} and not plan.cuts_losses
    assert proven(name, plan)


@pytest.mark.parametrize(("classes", "kind"), [(4, "S(-1)->R"), (6, "S(-1)->R"), (8, "S(-1)->L")])
def test_a_few_classes_are_cheaper_to_gather(classes: int, kind: str) -> None:
    model, ids = Nano(vocab=classes), torch.zeros(2, 8, dtype=torch.long)
    assert converted(make_plan(model, 2, tp=2, example_inputs=(ids, ids))) == {kind}


def test_and_is_refused_where_the_logits_are_to_be_returned_cut() -> None:
    with pytest.raises(InvalidArgument, match="returns no logits that are cut over their last dim"):
        planned("in steps", logits="sharded")


# --- a plan or a kernel that is wrong is found ---


def test_a_plan_without_the_sum_at_the_entry_fails() -> None:
    plan = planned("nano")
    modules = dict(plan.modules)
    modules["head"] = replace(modules["head"], inputs={})
    assert not proven("nano", replace(plan, modules=modules))


def test_logits_that_are_only_said_to_be_cut_are_refused() -> None:
    """What torch does with its own DTensor: it raises."""
    assert not proven("nano", respoken(planned("nano"), "S(-1)->D"))


@pytest.mark.parametrize("spoiled", ["all_reduce", "ReduceOp"])
def test_a_kernel_that_leaves_out_a_reduction_fails(spoiled: str) -> None:
    class Nothing:
        ReduceOp = torch.distributed.ReduceOp

        @staticmethod
        def all_reduce(value: Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: Any = None) -> None:
            if spoiled == "ReduceOp":  # the sum of the largest is no shift that all share
                torch.distributed.all_reduce(value, op=torch.distributed.ReduceOp.MAX, group=group)

    with mock.patch.object(kernel, "dist", Nothing):
        assert not proven("nano", planned("nano"))


# --- the kernel is torch's ---


@contextmanager
def cut(whole: Tensor, tp: int = 2, kind: str = "S(-1)->L") -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of ``whole``, a leaf, and what the model's code sees of it."""
    with simulated(tp):
        axis = Axis(init_device_mesh("cpu", (tp,)))
        share = Conversion.parse("R->S(-1)")(lift(whole.detach()), axis).requires_grad_()
        yield share, Conversion.parse(kind)(share, axis)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_it_is_torchs_cross_entropy(dtype: torch.dtype, reduction: str, ignored: str) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(12, 16, generator=generator) * 20).to(dtype).requires_grad_()
    target = torch.randint(0, 16, (12,), generator=generator)
    if ignored != "none":
        target[: 12 if ignored == "all" else 5] = 7
    want = F.cross_entropy(whole, target, ignore_index=7 if ignored != "none" else -1, reduction=reduction)
    weights = torch.arange(1.0, 1.0 + want.numel()).view(want.shape).to(dtype)
    want.backward(weights)
    with cut(whole, 4) as (share, logits):
        got = F.cross_entropy(logits, target, ignore_index=7 if ignored != "none" else -1, reduction=reduction)
        got.backward(weights)
        gots = on_each_rank(got, 4)
        gradient = torch.cat(on_each_rank(share.grad, 4), -1)  # type: ignore[arg-type]
    step = torch.finfo(dtype).eps
    for one in gots:
        torch.testing.assert_close(one, want.detach(), rtol=4 * step, atol=4 * step, equal_nan=True)
    assert whole.grad is not None
    torch.testing.assert_close(gradient, whole.grad, rtol=8 * step, atol=12 * 8 * step)


def test_under_autocast_it_is_wide() -> None:
    whole, target = torch.randn(12, 16).bfloat16(), torch.arange(12)
    with torch.autocast("cpu", torch.bfloat16):
        want = F.cross_entropy(whole, target)
        with cut(whole) as (_, logits):
            (got, _) = on_each_rank(F.cross_entropy(logits, target), 2)
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want)


def test_one_row_and_logits_that_cannot_be() -> None:
    whole = torch.tensor([1.0, -torch.inf, 2.0, 0.5, -torch.inf, -torch.inf, -torch.inf, -torch.inf])
    want = F.cross_entropy(whole, torch.tensor(2))
    with cut(whole) as (_, logits):
        (got, _) = on_each_rank(F.cross_entropy(logits, torch.tensor(2)), 2)
    assert float(got) == pytest.approx(float(want))


@pytest.mark.parametrize("target", [16, -1])
def test_a_target_that_is_no_class_is_no_number(target: int) -> None:
    with cut(torch.zeros(3, 16)) as (_, logits):
        for one in on_each_rank(F.cross_entropy(logits, torch.tensor([1, target, 2]), reduction="none"), 2):
            assert one.isnan().tolist() == [False, True, False]


# --- code that the trace did not run ---


@pytest.mark.parametrize(
    "work",
    [
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        lambda x, t: F.cross_entropy(x, t, weight=torch.linspace(0.5, 1.0, 16, dtype=torch.float64)),
        lambda x, t: F.nll_loss(x.log_softmax(-1), t),
        lambda x, t: torch.gather(x.softmax(-1), 1, t[:, None]).log().sum(),
        lambda x, t: x[t > 3].sum() + x.logsumexp(-1).square().mean(),
        lambda x, t: (x * torch.linspace(0.5, 1.0, 16, dtype=torch.float64)).square().sum(),
        lambda x, t: x.view(4, 3, 2, 8).transpose(0, 1)[..., 0].square().sum() + x[:, 3:5].square().sum(),
        lambda x, t: F.cross_entropy(x.view(4, 3, 16).transpose(1, 2), t.view(4, 3)),
        lambda x, t: F.cross_entropy(x.unsqueeze(0).squeeze(0).narrow(0, 2, 4), t[2:6]) + x.select(0, 1).sum(),
        lambda x, t: x.T.reshape(2, -1).square().mean(),
    ],
)
def test_it_sees_them_whole(work: Any) -> None:
    whole = torch.randn(12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    target = torch.arange(12)
    want = work(whole, target)
    want.backward()
    with cut(whole) as (share, logits):
        got = work(logits, target)
        got.backward()
        gots = on_each_rank(got, 2)
        gradient = torch.cat(on_each_rank(share.grad, 2), -1)  # type: ignore[arg-type]
    assert all(abs(float((one - want).detach())) < 1e-12 for one in gots)
    assert whole.grad is not None
    torch.testing.assert_close(gradient, whole.grad, rtol=1e-12, atol=1e-12)


def test_sizes_are_those_of_the_whole() -> None:
    with cut(torch.zeros(2, 3, 16)) as (_, logits):
        assert isinstance(logits, CutLogits)
        assert logits.shape == torch.Size([2, 3, 16]) and isinstance(logits.shape, torch.Size)
        assert logits.size(-1) == 16 and len(logits) == 2 and logits.dim() == 3
        assert isinstance(logits[:, :-1].reshape(-1, 16).float(), CutLogits)


def _power(logits: Tensor) -> None:
    logits **= 2


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.add_(torch.ones(16)),
        lambda x: x.__setitem__((0, 0), 1.0),
        lambda x: x.fill_diagonal_(1.0),
        lambda x: F.dropout(x, inplace=True),
        lambda x: torch.square(torch.ones(2, 16), out=x),
        _power,
    ],
)
def test_a_write_is_refused(write: Callable[[Any], object]) -> None:
    with cut(torch.zeros(2, 16)) as (_, logits), torch.no_grad():
        with pytest.raises(InvalidArgument, match="write into logits that are cut"):
            write(logits)
        write(torch.zeros(2, 16))


@pytest.mark.parametrize("kind", ["S(-1)->L", "S(-1)->LD"])
def test_the_model_returns_no_such_tensor(kind: str) -> None:
    with cut(torch.zeros(2, 16), kind=kind) as (_, logits):
        answer = hand_out(nn.Identity(), (), {"logits": (logits, None), "loss": torch.zeros(())})
        (made, _) = answer["logits"]
        assert not isinstance(made, CutLogits) and made.shape == (2, 16)
        assert hasattr(made, "placements") is (kind == "S(-1)->LD")


def test_without_gradients_they_are_whole() -> None:
    with cut(torch.zeros(2, 16)) as (share, _), torch.no_grad():
        again = Conversion.parse("S(-1)->L")(share, Axis(init_device_mesh("cpu", (2,))))
        assert not isinstance(again, CutLogits) and again.shape == (2, 16)


# --- it costs ---


def test_numbers_of_each_row_take_the_place_of_the_gather() -> None:
    plan, gathers = planned("mean"), planned("transposed")

    def sent(plan: Plan, op: str) -> int:
        return sum(row.bytes for row in plan.collectives if row.axis == "tp" and row.op == op)

    rows = 4 * 7
    assert sent(plan, "all_gather") == 0 and sent(gathers, "all_gather") == 4 * 8 * 24 * 8
    assert sent(plan, "all_reduce") - sent(gathers, "all_reduce") == 3 * rows * 8


def test_a_rank_keeps_its_share_of_the_probabilities() -> None:
    kept = [planned("criterion", tp).memory_bytes["activations"] for tp in (2, 4)]
    gathered = [planned("smoothed", tp).memory_bytes["activations"] for tp in (2, 4)]
    assert kept[0] < gathered[0] and kept[1] < gathered[1]
    assert kept[0] - kept[1] > gathered[0] - gathered[1]
