"""The public functions: plan, parallelize, auto_parallelize."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.errors import InvalidArgument, MeshMismatch
from autoshard.pipeline import Options, run
from autoshard.plans import Plan
from autoshard.reading import read_plan

if TYPE_CHECKING:
    from autoshard.optim.made import Wanted


def plan(
    model: nn.Module,
    world: int | None = None,
    *,
    tp: int | None = None,
    dp_shard: int | None = None,
    dp_replicate: int | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    dtype: str | None = None,
    memory: float | None = None,
    devices_per_node: int | None = None,
    overrides: Mapping[str, str] | None = None,
    example_inputs: Any = None,
    dump_dir: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Plan how a model is cut over a mesh. Needs no process group and no weights; the model is left as it is.

    Args:
        model: any module, on any device, meta included.
        world: number of ranks; the process group's size, or torchrun's, where left out.
        tp: pinned tensor-parallel degree; what is left out is chosen.
        dp_shard: pinned degree of sharded data parallelism.
        dp_replicate: pinned degree of replicated data parallelism.
        batch: sequences per data-parallel rank, 1 where left out.
        sequence: tokens per sequence, 2048 where left out.
        dtype: dtype of activations, such as ``"bfloat16"``; the parameters' own where left out.
        memory: GiB of one device, 80 where left out.
        devices_per_node: tp stays inside a node, of 8 devices where left out.
        overrides: ``"replicate"`` by module or parameter pattern, such as ``{"layers.*.adapter": "replicate"}``.
        example_inputs: a tuple of positional arguments, a dict of keyword arguments, or a pair of both; synthesised
            where left out.
        dump_dir: a directory that receives every stage as text.
        progress: called with the name of each pass as it starts.

    Raises:
        AutoshardError: with what is wrong, where, and what to do.
    """
    options = Options(
        world=_world(world),
        tp=tp,
        dp_shard=dp_shard,
        dp_replicate=dp_replicate,
        batch=batch or 1,
        sequence=sequence or 2048,
        dtype=dtype,
        memory_bytes=int((80 if memory is None else memory) * 2**30),
        devices_per_node=devices_per_node or 8,
        overrides=overrides or {},
        example_inputs=example_inputs,
    )
    made, stages = run(model, options, progress)
    if dump_dir is not None:
        from autoshard.dump import dump

        dump(Path(dump_dir), made, stages)
    return made


def parallelize(
    model: nn.Module,
    plan: Plan | Mapping[str, Any] | str | Path,
    *,
    optimizer: Wanted = None,
    mixed_precision: str | MixedPrecisionPolicy | None = None,
    offload: bool = False,
    checkpointing: str = "none",
    compile: bool = False,
    compile_backend: str | Callable[..., Any] | None = None,
    masters: torch.dtype | None = None,
) -> nn.Module:
    """Apply a plan to a model, in place, on every rank of a process group.

    Args:
        model: the model the plan was made for.
        plan: a plan, its dict, or a path to its file.
        optimizer: optimizers made before, which end on the sharded parameters, changed in place; or functions that
            make one of the sharded model's named parameters, such as ``torch.optim.AdamW``: see ``optimizers``.
        mixed_precision: ``"bfloat16"`` computes in bfloat16, and reduces and keeps parameters in float32; or torch's
            ``MixedPrecisionPolicy``, taken as it is.
        offload: keep parameters, gradients and optimizer state on the host between uses.
        checkpointing: recompute ``"none"`` of each block's activations in backward, ``"selective"``: all but matmuls
            and attention, or ``"full"``.
        compile: compile each block, in place.
        compile_backend: torch.compile's backend, ``"inductor"`` where left out.
        masters: ``torch.float32`` keeps float32 parameters and optimizer state for a bfloat16 or float16 model, each
            rank its own part; the forward stays in ``mixed_precision``, or in the model's own dtype.

    Returns:
        ``model``.

    Raises:
        AutoshardError: before anything is changed; on every rank if on one.
    """
    from autoshard.executor.agree import Unanimous
    from autoshard.executor.execute import apply, ensure_process_group, make_mesh
    from autoshard.executor.training import Training
    from autoshard.optim.forgotten import remember, warn_forgotten
    from autoshard.optim.made import make_all, split

    training = Training(mixed_precision, offload, checkpointing, compile, compile_backend, masters)
    ensure_process_group(offload)
    made = read_plan(plan)
    with Unanimous(made):
        if made.mesh.world != dist.get_world_size():
            raise MeshMismatch(
                f"the plan is for {made.mesh.world} ranks, and there are {dist.get_world_size()}",
                got=str(made.mesh),
                help=f"make a plan with world={dist.get_world_size()}, or start {made.mesh.world} processes",
            )
        existing, factories = split(optimizer)
    device_type = "cuda" if torch.cuda.is_available() and dist.get_backend() != "gloo" else "cpu"
    before = remember(model)
    apply(model, made, make_mesh(made, device_type), existing, training=training)
    warn_forgotten(model, before)
    with Unanimous(made):
        make_all(model, factories, sharded=made.mesh.world > 1)
    return model


def auto_parallelize(
    model: nn.Module,
    world: int | None = None,
    *,
    optimizer: Wanted = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    mixed_precision: str | MixedPrecisionPolicy | None = None,
    offload: bool = False,
    checkpointing: str = "none",
    compile: bool = False,
    compile_backend: str | Callable[..., Any] | None = None,
    masters: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """Plan and apply in one call, under torchrun; takes what ``plan`` and ``parallelize`` take.

    Returns:
        ``model``, changed in place.
    """
    from autoshard.executor.execute import ensure_process_group
    from autoshard.executor.together import together

    ensure_process_group(offload)
    made = together(lambda: _make_plan(model, world, **options)) if plan is None else plan
    return parallelize(
        model,
        made,
        optimizer=optimizer,
        mixed_precision=mixed_precision,
        offload=offload,
        checkpointing=checkpointing,
        compile=compile,
        compile_backend=compile_backend,
        masters=masters,
    )


_make_plan = plan


def _world(world: int | None) -> int:
    if world is not None:
        return world
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    raise InvalidArgument("the number of ranks is not known", help="pass world=, or run under torchrun")


__all__ = ["auto_parallelize", "parallelize", "plan"]
