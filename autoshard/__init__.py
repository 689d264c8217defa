"""autoshard: infer, explain, apply and prove how a PyTorch model is cut over a device mesh."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoshard.errors import AutoshardError
from autoshard.plans import Mesh, Plan

if TYPE_CHECKING:
    from autoshard.api import auto_parallelize, parallelize, plan
    from autoshard.clip import clip_grad_norm_, clip_grad_value_
    from autoshard.data import data_rank, data_world, token_mean
    from autoshard.execute import set_gradient_sync
    from autoshard.optim_made import optimizers
    from autoshard.scaler import GradScaler
    from autoshard.verification import verify
    from autoshard.whole import full_gradients, full_parameters

__version__ = "0.1.0"

#: Where each name lives that needs torch: loaded when it is first used, so that reading a plan stays instant.
_HOMES = {
    "auto_parallelize": "api",
    "parallelize": "api",
    "plan": "api",
    "clip_grad_norm_": "clip",
    "clip_grad_value_": "clip",
    "data_rank": "data",
    "data_world": "data",
    "token_mean": "data",
    "GradScaler": "scaler",
    "optimizers": "optim_made",
    "set_gradient_sync": "execute",
    "full_gradients": "whole",
    "full_parameters": "whole",
    "verify": "verification",
}

__all__ = [
    "AutoshardError",
    "GradScaler",
    "Mesh",
    "Plan",
    "auto_parallelize",
    "clip_grad_norm_",
    "clip_grad_value_",
    "data_rank",
    "data_world",
    "full_gradients",
    "full_parameters",
    "optimizers",
    "parallelize",
    "plan",
    "set_gradient_sync",
    "token_mean",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    value = getattr(import_module(f"autoshard.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
