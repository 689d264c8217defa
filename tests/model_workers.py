"""What the ranks run to hold a parallelized model against the same model in one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from models import build, logits_of, token_loss
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autoshard._torch import local_part
from autoshard.api import parallelize
from autoshard.executor.execute import set_gradient_sync
from autoshard.executor.whole import full_gradients, full_parameters
from autoshard.plans import Plan
from autoshard.proving.double import Double
from autoshard.reading import read_plan


def tokens(model: nn.Module, batch: int, length: int, seed: int) -> Tensor:
    """Token ids below the model's vocabulary."""
    table = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, table.num_embeddings, (batch, length), generator=generator)


def _local(ids: Tensor, plan: Plan) -> Tensor:
    """Return the sequences of this rank's data-parallel index: tp ranks see the same ones."""
    share = ids.shape[0] // plan.mesh.data
    index = dist.get_rank() // plan.mesh.tp
    return ids[index * share : (index + 1) * share]


def _error(got: Tensor | None, want: Tensor | None, scale: float) -> float:
    """Return the largest difference relative to the largest gradient that matters."""
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    return float((got - want).abs().max() / (want.abs().max() + 1e-6 * scale))


def parity(name: str, data: dict[str, Any], tied: bool = False) -> dict[str, float]:
    """Return the largest relative errors of outputs, loss and gradients, in float64."""
    with Double():
        return _parity(name, read_plan(data), tied)


def _parity(name: str, plan: Plan, tied: bool) -> dict[str, float]:
    reference = build(name)
    model = parallelize(copy.deepcopy(reference), plan)
    errors: dict[str, float] = {}
    for label, batch, length in (("shape 1", 4, 7), ("shape 2", plan.mesh.data, 11)):
        ids = tokens(reference, batch, length, seed=length)
        want = reference(ids)
        got = model(_local(ids, plan))
        share = _local(logits_of(want), plan)
        errors[f"{label} logits"] = float((logits_of(got) - share).abs().max() / share.abs().max())
        for accumulated in (1, 2):
            token_loss(reference(ids), ids).backward()
            set_gradient_sync(model, accumulated == 2 or label == "shape 1")
            token_loss(model(_local(ids, plan)), _local(ids, plan)).backward()
            if label == "shape 2" and accumulated == 1:
                continue  # gradients wait for the second backward
            wants = {n: p.grad for n, p in reference.named_parameters(remove_duplicate=False)}
            scale = max(float(g.abs().max()) for g in wants.values() if g is not None)
            gots = full_gradients(model)
            assert gots.keys() == wants.keys()
            for fqn, gradient in gots.items():
                errors[f"{label} x{accumulated} {fqn}"] = _error(gradient, wants[fqn], scale)
        reference.zero_grad()
        model.zero_grad()
    model.eval(), reference.eval()
    with torch.no_grad():
        ids = tokens(reference, 1, 5, seed=1)
        errors["eval"] = float((logits_of(model(ids)) - logits_of(reference(ids))).abs().max())
    if tied:
        assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))
        names = [n for n, _ in model.named_parameters(remove_duplicate=False)]
        assert len(names) > len(list(model.parameters()))
    return errors


def training(name: str, data: dict[str, Any], flags: dict[str, bool]) -> dict[str, Any]:
    """Train three steps in float32, the optimizer made before; return errors and bytes."""
    import gc
    import weakref

    plan = read_plan(data)
    reference = build(name, torch.float32)
    model = copy.deepcopy(reference)
    settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, **flags}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    old = [weakref.ref(p) for p in model.parameters()]
    group = optimizer.param_groups[0]
    assert parallelize(model, plan, optimizer=optimizer) is model
    gc.collect()
    twin = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    for step in range(3):
        ids = tokens(reference, 4, 7, seed=step)
        for one, its, rows in ((reference, twin, ids), (model, optimizer, _local(ids, plan))):
            its.zero_grad()
            token_loss(one(rows), rows).backward()
            norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            its.step()
    wants = dict(reference.named_parameters(remove_duplicate=False))
    error = max(float((p - wants[n]).abs().max()) for n, p in full_parameters(model).items())
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return {
        "error": error,
        "norm": float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm),
        "alive": sum(r() is not None for r in old),
        "same group": optimizer.param_groups[0] is group,
        "parameters": sum(_bytes(p) for p in model.parameters()),
        "optimizer": sum(_bytes(m) for m in moments),
        "keys": list(model.state_dict()) == list(reference.state_dict()),
    }


def _bytes(tensor: Tensor) -> int:
    local = local_part(tensor) if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()
