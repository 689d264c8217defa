"""How a sharded model trains: mixed precision, offload, checkpointing, compilation.

These are options of ``parallelize``, not of the plan: they change neither names nor shapes. They are applied in the
one order that works: tensor parallelism, checkpointing, compilation, FSDP. FSDP's hooks then lie outside of what is
recomputed and compiled, and a compiled block knows what it recomputes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from autoshard.errors import InvalidArgument
from autoshard.executor.checks import check_fsdp
from autoshard.executor.gradsum import UnitSums
from autoshard.executor.masters import own_policy
from autoshard.executor.recompute import MODES, recompute
from autoshard.executor.sums import check_dtype
from autoshard.executor.units import Units
from autoshard.plans import Plan

BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Training:
    """The options of ``parallelize`` besides the plan.

    Attributes:
        mixed_precision: None, ``"bfloat16"`` (bfloat16 parameters and activations, float32 reductions and float32
            parameters in the optimizer), or torch's policy, taken as it is.
        offload: whether parameters, gradients and optimizer state stay on the host between uses.
        checkpointing: what of each block's activations is recomputed in backward: ``"none"``, ``"selective"`` (all
            but matmuls and attention) or ``"full"``.
        compile: whether each block is compiled, in place.
        compile_backend: torch.compile's backend, ``"inductor"`` where left out.
        masters: ``torch.float32`` for float32 parameters in the optimizer of a model that is narrower; the forward
            computes in what ``mixed_precision`` says, or in the model's own dtype. None to leave parameters alone.
        tp_reduce_dtype: what sums over tp run in, of activations, of their gradients and of partial gradients of whole
            parameters; None for the dtype of each value, and mixed precision's own for gradients of parameters.
    """

    mixed_precision: str | MixedPrecisionPolicy | None = None
    offload: bool = False
    checkpointing: str = "none"
    compile: bool = False
    compile_backend: str | Callable[..., Any] | None = None
    masters: torch.dtype | None = None
    tp_reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        given = self.mixed_precision
        if given is not None and given != BFLOAT16 and not isinstance(given, MixedPrecisionPolicy):
            raise InvalidArgument(
                f"no mixed precision is called {given!r}",
                got=f"{given!r}; allowed: None, {BFLOAT16!r}, a torch.distributed.fsdp.MixedPrecisionPolicy",
            )
        if self.checkpointing not in MODES:
            raise InvalidArgument(
                f"no activation checkpointing is called {self.checkpointing!r}",
                got=f"{self.checkpointing!r}; allowed: {', '.join(MODES)}",
            )
        if self.compile_backend is not None and not self.compile:
            raise InvalidArgument("a backend is given and nothing is compiled", help="pass compile=True as well")
        if self.masters not in (None, torch.float32):
            raise InvalidArgument(
                f"no masters are kept in {self.masters}", got=f"{self.masters}; allowed: None, torch.float32"
            )
        check_dtype(self.tp_reduce_dtype)
        if self.masters is not None and isinstance(given, MixedPrecisionPolicy) and given.param_dtype is None:
            raise InvalidArgument(
                "a policy without param_dtype would compute in float32 on float32 masters",
                help="MixedPrecisionPolicy(param_dtype=torch.bfloat16, ...), or leave mixed_precision out",
            )

    def __str__(self) -> str:
        """One line that is equal on ranks with equal options."""
        backend = getattr(self.compile_backend, "__qualname__", self.compile_backend)
        return (
            f"mixed_precision={self.mixed_precision}, offload={self.offload}, checkpointing={self.checkpointing}, "
            f"compile={self.compile}, compile_backend={backend}, masters={self.masters}, "
            f"tp_reduce_dtype={self.tp_reduce_dtype}"
        )

    def uses_fsdp(self, plan: Plan) -> bool:
        """Whether the model is given to FSDP: also over a single data rank where only FSDP has the option."""
        return plan.mesh.data > 1 or self.mixed_precision is not None or self.masters is not None or self.offload

    @property
    def sum_dtype(self) -> torch.dtype | None:
        """The dtype that partial gradients over tp are kept in, and summed in; None for that of the gradient."""
        policy = self._policy(True)
        return None if policy is None else policy.reduce_dtype

    def policies(self, root: bool) -> dict[str, Any]:
        """Return the arguments of ``fully_shard`` for the model (``root``) or for a unit inside."""
        made: dict[str, Any] = {}
        policy = self._policy(root)
        if policy is not None:
            made["mp_policy"] = policy
        if self.offload:
            made["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        return made

    def _policy(self, root: bool) -> MixedPrecisionPolicy | None:
        if isinstance(self.mixed_precision, MixedPrecisionPolicy) or self.mixed_precision is None:
            return self.mixed_precision
        # what modules hand to each other is the model's own business: float positions, say, must not lose digits
        return MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=root)

    def check(self, model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
        """Refuse an option that could not do for this model what it says; change nothing.

        Raises:
            InvalidArgument: with the option and what to do.
        """
        if plan.mesh.data == 1 and self.uses_fsdp(plan):
            check_fsdp(model, plan)
        if self.mixed_precision == BFLOAT16 and self.masters is None:
            _check_master(model)
        if self.offload:
            _check_backends(mesh.device_type)
        if (self.checkpointing != "none" or self.compile) and not blocks(model, plan):
            option = "compile" if self.checkpointing == "none" else "checkpointing"
            raise InvalidArgument(
                f"{option} works block by block, and the plan has none",
                got="no fsdp unit with modules inside, besides the model itself",
                help="leave the option out, or apply torch.utils.checkpoint and torch.compile in the model",
            )

    def settled(self, model: nn.Module) -> Training:
        """Return the options with the policy that masters alone mean for ``model``, which is not sharded.

        Raises:
            InvalidArgument: it has no one dtype to compute in, or needs no masters.
        """
        if self.masters is None or self.mixed_precision is not None:
            return self
        return replace(self, mixed_precision=own_policy(model, self.masters))

    def prepare(self, model: nn.Module, plan: Plan, sums: Sequence[UnitSums]) -> None:
        """Checkpoint and compile the blocks, in place: after tensor parallelism, before FSDP.

        Args:
            model: the model.
            plan: for its units.
            sums: the gradient sums that parameters are read through.
        """
        if self.checkpointing == "none" and not self.compile:
            return
        for module in blocks(model, plan):
            if self.checkpointing != "none":
                recompute(module, self.checkpointing, sums)
            if self.compile:
                module.compile(backend=self.compile_backend or "inductor")


PLAIN = Training()


def blocks(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """Return the outermost units inside the model that have modules inside: a lone layer has nothing to recompute."""
    units = Units(model, plan)
    found: list[nn.Module] = []
    for name in reversed(units.names[:-1]):
        module = units.modules[name]
        if any(True for _ in module.children()) and all(module not in set(outer.modules()) for outer in found):
            found.append(module)
    return found[::-1]


def _check_master(model: nn.Module) -> None:
    """Refuse parameters that are narrow already: there would be no float32 values for the optimizer."""
    narrow = [n for n, p in model.named_parameters() if p.requires_grad and p.dtype in (torch.bfloat16, torch.float16)]
    if narrow:
        raise InvalidArgument(
            f"mixed_precision={BFLOAT16!r} trains float32 parameters, and {len(narrow)} are narrower already",
            at=narrow[0],
            help="pass masters=torch.float32 for float32 parameters in the optimizer; or, to train without them, "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)",
        )


def _check_backends(device_type: str) -> None:
    """Refuse offload where the process group cannot reduce the norms of gradients that lie on the host."""
    backends = dist.get_backend_config()
    if device_type != "cpu" and "cpu:" not in backends:
        raise InvalidArgument(
            "offload needs a process group that also works on the host",
            got=f"backends {backends}",
            help='torch.distributed.init_process_group("cpu:gloo,cuda:nccl")',
        )
