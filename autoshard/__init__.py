"""autoshard: infer, explain, apply and prove how a PyTorch model is cut over a device mesh."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoshard.errors import AutoshardError
from autoshard.plans import Mesh, Plan

if TYPE_CHECKING:
    from autoshard.api import auto_parallelize, parallelize, plan
    from autoshard.executor.data import data_rank, data_world, token_mean
    from autoshard.executor.execute import set_gradient_sync
    from autoshard.executor.whole import full_gradients, full_parameters
    from autoshard.optim.clip import clip_grad_norm_, clip_grad_value_
    from autoshard.optim.made import optimizers
    from autoshard.optim.scaler import GradScaler
    from autoshard.proving.verification import verify

__version__ = "0.1.0"

#: Where each name lives that needs torch: loaded when it is first used, so that reading a plan stays instant.
_HOMES = {
    "auto_parallelize": "api",
    "parallelize": "api",
    "plan": "api",
    "clip_grad_norm_": "optim.clip",
    "clip_grad_value_": "optim.clip",
    "data_rank": "executor.data",
    "data_world": "executor.data",
    "token_mean": "executor.data",
    "GradScaler": "optim.scaler",
    "optimizers": "optim.made",
    "set_gradient_sync": "executor.execute",
    "full_gradients": "executor.whole",
    "full_parameters": "executor.whole",
    "verify": "proving.verification",
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
