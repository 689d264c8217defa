"""What the ranks run with logits that stay cut, held against one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from logits_models import make
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from autoshard import token_mean
from autoshard.api import parallelize
from autoshard.executor.whole import full_gradients
from autoshard.proving.double import Double
from autoshard.reading import read_plan

IGNORED = -100


def _batch(seed: int, rows: int = 4, length: int = 7) -> tuple[Tensor, Tensor]:
    """Ids, and labels of which some are ignored: more in the first rows, so that data ranks count differently."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(1, 24, (2, rows, length), generator=generator)
    labels[0, 2:] = labels[2, 5] = IGNORED
    return ids, labels


def _results(answer: Any) -> list[Tensor]:
    if isinstance(answer, Tensor):
        return [answer]
    return [answer.logits] if hasattr(answer, "logits") else [*answer.values()]


def _loss_sum(answer: Any, labels: Tensor) -> Tensor:
    sums: list[Tensor] = [
        F.cross_entropy(one.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        for one in _results(answer)
    ]
    return torch.stack(sums).sum() if len(sums) > 1 else sums[0]


def _mine(value: Tensor, plan: Any) -> Tensor:
    """This rank's data-parallel share."""
    share: Tensor = value.chunk(plan.mesh.data)[dist.get_rank() // plan.mesh.tp]
    return share


def trained(name: str, data: dict[str, Any], length: int = 7, checkpointing: str = "none") -> dict[str, float]:
    """Errors of the loss and of each gradient over two steps, and of logits without gradients between them."""
    with Double():
        plan, reference = read_plan(data), make(name)
        model = parallelize(copy.deepcopy(reference), plan, checkpointing=checkpointing)
        errors: dict[str, float] = {}
        for step in range(2):
            ids, labels = _batch(step, length=length)
            want = _loss_sum(reference(ids), labels) / (labels != IGNORED).sum()
            want.backward()
            mine = _mine(labels, plan)
            with loss_parallel():
                answer = model(_mine(ids, plan))
                assert all(_stays_cut(one, plan) for one in _results(answer))
                got = token_mean(_loss_sum(answer, mine), (mine != IGNORED).sum(), model)
                got.backward()
            errors[f"{step} loss"] = float(abs(got.detach() - want.detach()) / want.detach())
            for fqn, error in gradient_errors(reference, model).items():
                errors[f"{step} {fqn}"] = error
            with torch.no_grad():
                for number, (one, whole) in enumerate(
                    zip(*(_results(m(ids)) for m in (model, reference)), strict=True)
                ):
                    assert not isinstance(one, DTensor)
                    errors[f"{step} result {number} without gradients"] = float((one - whole).abs().max())
    return errors


def _stays_cut(logits: Tensor, plan: Any) -> bool:
    assert isinstance(logits, DTensor)
    cut = logits.device_mesh.mesh_dim_names == ("tp",) and logits.placements == (Shard(logits.dim() - 1),)
    return cut and logits.to_local().shape[-1] * plan.mesh.tp == logits.shape[-1]


def gradient_errors(reference: nn.Module, model: nn.Module) -> dict[str, float]:
    """Errors of the gradients of a sharded model, by name, relative to those of one process."""
    gots = full_gradients(model)
    wants = {n: p.grad for n, p in reference.named_parameters(remove_duplicate=False)}
    scale = max(float(g.abs().max()) for g in wants.values() if g is not None)
    found = {}
    for fqn, want in wants.items():
        got = gots[fqn]
        assert want is not None and got is not None, fqn
        found[fqn] = float((got - want).abs().max() / (want.abs().max() + 1e-6 * scale))
    return found


def plain(data: dict[str, Any]) -> dict[str, float]:
    """Errors of the usual loop, a mean of cross-entropy; and of another loss, on ``full_tensor``."""
    with Double():
        plan, reference = read_plan(data), make("decoder")
        model = parallelize(copy.deepcopy(reference), plan)
        ids, labels = _batch(0)
        want = F.cross_entropy(reference(ids).flatten(0, 1), labels.flatten())
        want.backward()
        with loss_parallel():
            got = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
            got.backward()
        errors = {"loss": abs(got.item() - want.item()), **gradient_errors(reference, model)}
        for one in (reference, model):
            one.zero_grad()
        reference(ids).pow(2).mean().backward()
        model(ids).full_tensor().pow(2).mean().backward()
        return errors | {f"whole {fqn}": error for fqn, error in gradient_errors(reference, model).items()}


def narrow(cut: dict[str, Any], whole: dict[str, Any]) -> dict[str, float]:
    """Under bfloat16 mixed precision: how the loss and gradients on cut logits differ from those on whole ones."""
    losses, gradients = [], []
    ids, labels = _batch(0)
    for data in (whole, cut):
        plan = read_plan(data)
        model = parallelize(make("llama").float(), plan, mixed_precision="bfloat16")
        mine = _mine(labels, plan)
        with loss_parallel():
            answer: Any = model(_mine(ids, plan))
            assert answer.logits.dtype == torch.bfloat16
            loss = token_mean(_loss_sum(answer, mine), (mine != IGNORED).sum(), model)
            loss.backward()
        losses.append(float(loss))
        gradients.append(full_gradients(model))
    errors = {"loss": abs(losses[1] - losses[0])}
    scale = max(float(g.abs().max()) for g in gradients[0].values() if g is not None)
    for fqn, want in gradients[0].items():
        got = gradients[1][fqn]
        assert want is not None and got is not None
        errors[fqn] = float((got - want).abs().max()) / scale
    return errors


def labelled(data: dict[str, Any]) -> dict[str, Any]:
    """What a model does that was planned without labels and is given some, in and outside of ``loss_parallel``."""
    with Double():
        reference: Any = make("llama")
        model: Any = parallelize(copy.deepcopy(reference), read_plan(data))
        ids, labels = _batch(0)
        want = reference(ids, labels=labels).loss
        want.backward()
        said = ""
        try:
            model(ids, labels=labels)
        except RuntimeError as error:
            said = str(error)
        with loss_parallel():
            got = model(ids, labels=labels).loss
            got.backward()
        with torch.no_grad():
            evaluated = model(ids, labels=labels).loss
        errors = {"loss": abs(got.item() - want.item()), "evaluated": abs(evaluated.item() - want.item())}
        return {"errors": errors | gradient_errors(reference, model), "said": said}


def generated(data: dict[str, Any]) -> tuple[list[int], list[int]]:
    """What a model generates, with gradients enabled around it, and what one process does."""
    with Double():
        reference: Any = make("llama")
        model: Any = parallelize(copy.deepcopy(reference), read_plan(data))
        ids, _ = _batch(1)
        sizes: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        got, want = (one.generate(ids, use_cache=True, **sizes).flatten().tolist() for one in (model, reference))
        return got, want
