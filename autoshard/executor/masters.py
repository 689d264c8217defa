"""Float32 masters of a model in bfloat16 or float16: what the optimizer steps on, where the forward stays narrow.

A step that is small beside a bfloat16 value rounds to nothing. ``model.float()`` before sharding would cure it, at the
price of the whole model in float32 on every rank. Here each parameter is cut first, and only a rank's part of it is
widened, one at a time; FSDP narrows the part again before it gathers.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from autoshard._torch import change_sharded
from autoshard.errors import InvalidArgument
from autoshard.executor.held import HELD, Held
from autoshard.executor.styles import like


def has_master(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Whether ``parameter`` gets a master in ``dtype``: it is trained, and narrower."""
    narrower = parameter.dtype.is_floating_point and parameter.dtype.itemsize < dtype.itemsize
    return parameter.requires_grad and narrower


def own_dtype(model: nn.Module, dtype: torch.dtype) -> torch.dtype:
    """Return the one dtype that ``model`` computes in, before it gets masters.

    Args:
        model: not sharded.
        dtype: of the masters.

    Raises:
        InvalidArgument: its parameters are of several dtypes, or none would get a master.
    """
    first: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.dtype.is_floating_point and parameter.dim():
            first.setdefault(parameter.dtype, name)
    if len(first) > 1:
        # FSDP gathers a unit in one dtype: the wider parameters would be rounded without a word
        raise InvalidArgument(
            f"masters keep the model's own dtype in the forward, and its parameters have {len(first)}",
            got=", ".join(f"{name}: {kind}" for kind, name in first.items()),
            help='say what to compute in: mixed_precision="bfloat16" as well',
        )
    if not any(has_master(parameter, dtype) for parameter in model.parameters()) or not first:
        raise InvalidArgument(
            f"masters={dtype} would change nothing: no trainable parameter is narrower",
            got=", ".join(map(str, first)),
            help="leave masters out; mixed_precision alone keeps float32 parameters float32",
        )
    return next(iter(first))


def own_policy(model: nn.Module, dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Return the policy that computes in the model's own dtype; inputs and buffers stay what they are.

    Raises:
        InvalidArgument: as ``own_dtype``.
    """
    return MixedPrecisionPolicy(own_dtype(model, dtype), reduce_dtype=dtype, cast_forward_inputs=False)


def widen(model: nn.Module, dtype: torch.dtype) -> None:
    """Hold every trained parameter that is narrower in ``dtype``, in place; the objects stay, so ties do.

    Scalars, which FSDP does not gather, are read in the dtype they had.

    Args:
        model: FSDP has cut it, and no forward has run.
        dtype: of the masters.
    """
    owned = [(m, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    scalars = [one for one in owned if one[2].dim() == 0 and has_master(one[2], dtype)]
    for module, name, parameter in scalars:
        held: Held = module.__dict__[HELD][name]
        held.dtype = parameter.dtype
    for _, _, parameter in scalars:  # a tied one comes twice, and is as wide then
        _widen_one(parameter, dtype)
    change_sharded(model, partial(_widen_one, dtype=dtype))


def _widen_one(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    if has_master(parameter, dtype):
        wide = parameter.detach().to(dtype)
        assert isinstance(wide, DTensor)
        torch.utils.swap_tensors(parameter, like(wide, parameter))
