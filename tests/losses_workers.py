"""What the ranks run of models that compute their own loss, held against one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from logits_workers import gradient_errors
from losses_models import batch, call, loss_of, make
from torch import Tensor
from torch.distributed.tensor import DTensor

from autoshard.api import parallelize
from autoshard.executor.cut_logits import CutLogits
from autoshard.executor.whole import full_gradients
from autoshard.proving.double import Double
from autoshard.reading import read_plan


def _parts(given: Any, number: int) -> list[Any]:
    """The data ranks' shares of a batch."""
    keys = list(given) if isinstance(given, dict) else range(len(given))
    chunks = [[given[key].chunk(number)[i] for key in keys] for i in range(number)]
    return [dict(zip(keys, one, strict=True)) if isinstance(given, dict) else tuple(one) for one in chunks]


def trained(name: str, data: dict[str, Any], checkpointing: str = "none") -> dict[str, float]:
    """Errors of the loss, of what else is returned and of each gradient over two steps, and without gradients."""
    with Double():
        plan, reference = read_plan(data), make(name)
        model = parallelize(copy.deepcopy(reference), plan, checkpointing=checkpointing)
        mine = dist.get_rank() // plan.mesh.tp
        errors: dict[str, float] = {}
        for step in range(2):
            parts = _parts(batch(reference, step), plan.mesh.data)
            wants = [call(reference, part) for part in parts]
            torch.stack([loss_of(want) for want in wants]).mean().backward()
            got = call(model, parts[mine])
            loss_of(got).backward()
            with torch.no_grad():
                still = call(model, parts[mine])
            for mode, answer in (("", got), (" without gradients", still)):
                for path, (one, want) in enumerate(zip(_tensors(answer), _tensors(wants[mine]), strict=True)):
                    errors[f"{step} result {path}{mode}"] = _error(one, want, plan.cuts_logits and not mode)
            for fqn, error in gradient_errors(reference, model).items():
                errors[f"{step} {fqn}"] = error
        return errors


def _tensors(answer: Any) -> list[Tensor]:
    found = [*answer.values()] if hasattr(answer, "values") and not isinstance(answer, Tensor) else answer
    return [found] if isinstance(found, Tensor) else [one for one in found if isinstance(one, Tensor)]


def _error(got: Tensor, want: Tensor, may_be_cut: bool) -> float:
    assert not isinstance(got, CutLogits)
    assert not isinstance(got, DTensor) or may_be_cut
    assert isinstance(got, DTensor) or got.dim() != 3 or not may_be_cut
    whole = got.full_tensor() if isinstance(got, DTensor) else got
    return float((whole.detach() - want.detach()).abs().max())


def unlabelled(name: str, data: dict[str, Any]) -> dict[str, float]:
    """Errors of the whole logits that a model returns, with gradients, that was planned with labels and given none."""
    with Double():
        reference = make(name)
        model = parallelize(copy.deepcopy(reference), read_plan(data))
        given = batch(reference)
        ids = given["input_ids"] if isinstance(given, dict) else given[0]
        want, got = (_tensors(one(ids))[0] for one in (reference, model))
        assert type(got) is Tensor
        for one in (want, got):
            one.square().mean().backward()
        return {"logits": float((got - want).detach().abs().max()), **gradient_errors(reference, model)}


def narrow(cut: dict[str, Any], whole: dict[str, Any]) -> dict[str, float]:
    """Under bfloat16 mixed precision: how the loss and gradients on cut logits differ from those on whole ones."""
    losses, gradients = [], []
    for data in (whole, cut):
        model: Any = parallelize(make("llama").float(), read_plan(data), mixed_precision="bfloat16")
        loss = model(**batch(make("llama"))).loss
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(full_gradients(model))
    errors = {"loss": abs(losses[1] - losses[0])}
    scale = max(float(g.abs().max()) for g in gradients[0].values() if g is not None)
    for fqn, want in gradients[0].items():
        got = gradients[1][fqn]
        assert want is not None and got is not None
        errors[fqn] = float((got - want).abs().max()) / scale
    return errors
