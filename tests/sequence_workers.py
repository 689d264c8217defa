"""What the ranks run with the sequence cut between regions, held against one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from drawing_workers import Masks, Player, Recorder
from models import build, token_loss
from sequence_models import ids_of, make
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoshard.api import parallelize
from autoshard.errors import InvalidArgument
from autoshard.executor.execute import set_gradient_sync
from autoshard.executor.whole import full_gradients
from autoshard.proving.double import Double
from autoshard.reading import read_plan

#: Two lengths that tp divides.
LENGTHS = (8, 12)


def local(ids: Tensor, plan: Any) -> Tensor:
    """The sequences of this rank's data-parallel index."""
    share = ids.shape[0] // plan.mesh.data
    index = dist.get_rank() // plan.mesh.tp
    return ids[index * share : (index + 1) * share]


@contextlib.contextmanager
def recomputed(model: nn.Module, how: str) -> Iterator[None]:
    """Run the model's blocks under torch's checkpointing, of the given kind."""
    if how not in ("reentrant", "not reentrant"):
        yield
        return
    blocks = [module for name, module in model.named_modules() if name.count(".") == 1 and name.startswith("blocks.")]
    for block in blocks:
        inner = block.__call__

        def forward(x: Tensor, inner: Any = inner) -> Any:
            return checkpoint(inner, x, use_reentrant=how == "reentrant")

        block.__dict__["checkpointed"] = forward
    with mock.patch.object(nn.ModuleList, "__iter__", _through):
        yield


def _through(blocks: nn.ModuleList) -> Iterator[Any]:
    for block in blocks._modules.values():
        assert block is not None
        yield block.__dict__.get("checkpointed", block)


def parity(name: str, data: dict[str, Any], how: str = "none") -> dict[str, float]:
    """The largest relative errors of outputs and gradients; another forward without gradients before each backward."""
    plan = read_plan(data)
    reference = make(name)
    compiled: dict[str, Any] = {"compile": True, "compile_backend": "aot_eager"} if how == "compiled" else {}
    model = parallelize(copy.deepcopy(reference), plan, checkpointing="full" if how == "ours" else "none", **compiled)
    errors: dict[str, float] = {}
    for length in LENGTHS:
        ids = ids_of(4, length, seed=length)
        for accumulated in (1, 2):
            want = reference(ids)
            token_loss(want, ids).backward()
            set_gradient_sync(model, accumulated == 2)
            mine = local(ids, plan)
            with recomputed(model, how):
                got = model(mine)
                with torch.no_grad():
                    model(mine[:, :5])
                token_loss(got, mine).backward()
            errors[f"{length} logits"] = float((got - local(want, plan)).abs().max())
        wants = {n: p.grad for n, p in reference.named_parameters(remove_duplicate=False)}
        scale = max(float(g.abs().max()) for g in wants.values() if g is not None)
        for fqn, gradient in full_gradients(model).items():
            want = wants[fqn]
            if gradient is None or want is None:
                assert gradient is want
                continue
            errors[f"{length} {fqn}"] = float((gradient - want).abs().max() / (want.abs().max() + 1e-6 * scale))
        reference.zero_grad()
        model.zero_grad()
    for length in (1, 7):
        with torch.no_grad():
            ids = ids_of(2, length)
            errors[f"{length} without gradients"] = float((model(ids) - reference(ids)).abs().max())
    return errors


def said(name: str, data: dict[str, Any]) -> dict[str, str]:
    """What is refused, and how; what was still to run then."""
    model: Any = parallelize(make(name), read_plan(data))
    ran: list[str] = []
    for fqn, module in model.named_modules():
        if fqn:
            module.register_forward_pre_hook(lambda module, args, fqn=fqn: ran.append(fqn))
    found: dict[str, str] = {}

    def attempt(key: str, run: Any) -> None:
        try:
            run()
        except InvalidArgument as error:
            found[key] = str(error)

    attempt("length", lambda: model(ids_of(2, 7)))
    found["ran"] = ",".join(ran)
    x = torch.zeros(2, 8, 16, dtype=torch.float64)
    attempt("a block alone", lambda: model.blocks[0](x))
    attempt("a norm alone", lambda: model.norm(x))
    with torch.no_grad():
        attempt("without gradients", lambda: model.blocks[0](model.norm(x)))
    attempt("afterwards", lambda: model(ids_of(2, 8)))
    return found


def collected(name: str, data: dict[str, Any]) -> list[float]:
    """Errors of what the model hands out of its stream when asked to, with gradients and without."""
    reference = make(name)
    model = parallelize(copy.deepcopy(reference), read_plan(data))
    ids, found = ids_of(2, 8), []
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode:
            pairs = zip(model(ids, collect=True), reference(ids, collect=True), strict=True)
            found += [float((got - want).abs().max()) if got.shape == want.shape else 1.0 for got, want in pairs]
    return found


def generated(data: dict[str, Any]) -> tuple[list[int], list[int], float]:
    """What a model generates with a cache, what one process does, and the error of a training loss before and after."""
    with Double():
        reference: Any = build("llama")
        model: Any = parallelize(copy.deepcopy(reference), read_plan(data))
        ids = torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(3))
        errors, answers = [], []
        for _ in range(2):
            errors.append(float(abs(token_loss(model(ids), ids) - token_loss(reference(ids), ids))))
            sizes: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "use_cache": True, "pad_token_id": 0}
            answers = [one.generate(ids[:, :7], **sizes).flatten().tolist() for one in (model, reference)]
    return answers[0], answers[1], max(errors)


def dropped(data: dict[str, Any], checkpointing: str = "none") -> dict[str, Any]:
    """Errors in training against one process that drops the same places, and whether ranks agree without gradients."""
    model = parallelize(make("dropping"), read_plan(data), checkpointing=checkpointing).train()
    ids = ids_of(2, 8)
    recorder = Recorder()
    torch.manual_seed(5)
    with mock.patch.object(F, "dropout", recorder):
        first = model(ids)
    torch.manual_seed(5)
    got = model(ids)
    got.pow(2).sum().backward()
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, recorder.masks)
    masks: Masks = [torch.cat(ranks, 1) for ranks in zip(*parts, strict=True)]
    reference = make("dropping").train()
    with mock.patch.object(F, "dropout", Player(masks)):
        want = reference(ids)
    want.pow(2).sum().backward()
    gradients = full_gradients(model)
    errors = {"again": float((got - first).abs().max()), "output": float((got - want).abs().max())}
    for name, parameter in reference.named_parameters():
        gradient = gradients[name]
        if parameter.grad is not None and gradient is not None:
            errors[name] = float((gradient - parameter.grad).abs().max())
    with torch.no_grad():
        alike: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(alike, model(ids))
    return {
        "errors": errors,
        "shapes": [tuple(mask.shape) for mask in recorder.masks],
        "same masks": all(torch.equal(a, b) for a, b in zip(parts[0], parts[1], strict=True)),
        "ranks agree without gradients": all(torch.equal(one, alike[0]) for one in alike),
    }
