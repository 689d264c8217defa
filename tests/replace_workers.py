"""What the ranks run to see that replaced modules compile, and that checkpoints stay torch's own."""

from __future__ import annotations

import copy
from typing import Any

import torch
from models import build
from torch import Tensor

from autoshard.api import parallelize
from autoshard.executor.whole import full_gradients, full_parameters
from autoshard.reading import read_plan


def compiled(name: str, data: dict[str, Any]) -> dict[str, float]:
    """Return the largest error of outputs and gradients of blocks that are compiled and recomputed."""
    reference = build(name)
    model = parallelize(
        copy.deepcopy(reference), read_plan(data), compile=True, compile_backend="aot_eager", checkpointing="full"
    )
    ids = torch.arange(2, 16).reshape(2, 7)
    want, got = reference(ids), model(ids)
    want.square().mean().backward(), got.square().mean().backward()
    wants = {n: p.grad for n, p in reference.named_parameters()}
    return {"": _error(got, want), **{n: _error(g, wants[n]) for n, g in full_gradients(model).items()}}


def keys_and_values(name: str, data: dict[str, Any]) -> bool:
    """Whether the names and whole values of a parallelized model are those of the untouched one."""
    reference = build(name)
    model = parallelize(copy.deepcopy(reference), read_plan(data))
    whole = full_parameters(model)
    same = all(torch.equal(whole[n], p) for n, p in reference.named_parameters())
    return same and list(model.state_dict()) == list(reference.state_dict())


def _error(got: Tensor | None, want: Tensor | None) -> float:
    assert got is not None and want is not None
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-6))
