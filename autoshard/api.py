"""The public functions: plan, parallelize, auto_parallelize."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.cluster import Cluster
from autoshard.errors import MeshMismatch
from autoshard.options import make_options
from autoshard.pipeline import run
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
    device: str | Cluster | None = None,
    memory: float | None = None,
    devices_per_node: int | None = None,
    interconnect: str | None = None,
    global_batch: int | None = None,
    optimizer: str | None = None,
    mixed_precision: str | None = None,
    masters: str | None = None,
    tp_reduce_dtype: str | None = None,
    checkpointing: str | None = None,
    sequence_parallel: bool | None = None,
    logits: str | None = None,
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
        device: the name of a device, such as ``"H100-80"``, or a whole ``Cluster``; an H100 of 80 GiB where left out.
        memory: GiB of one device; its own where left out.
        devices_per_node: devices that share the fast link; as the device is usually built where left out.
        interconnect: between nodes, such as ``"400Gb"`` a device; as usual where left out.
        global_batch: sequences of one step over all data ranks, in place of ``batch``.
        optimizer: ``"adamw"``, ``"sgd"`` or ``"sgd-momentum"``, for what it keeps of each parameter; adamw where left
            out.
        mixed_precision: ``"bfloat16"`` as in ``parallelize``.
        masters: ``"float32"`` for float32 parameters in the optimizer of a narrower model, as in ``parallelize``.
        tp_reduce_dtype: ``"float32"``, for one, to sum over tp in it, as in ``parallelize``.
        checkpointing: ``"none"``, ``"selective"`` or ``"full"``; chosen where left out.
        sequence_parallel: whether tp ranks divide the sequence between regions in training (sequence parallelism).
        logits: ``"sharded"`` returns logits as they are cut over tp, where gradients are recorded: DTensors, for
            torch's ``loss_parallel``; ``"whole"`` where left out.
        overrides: ``"replicate"`` by module or parameter pattern, such as ``{"layers.*.adapter": "replicate"}``.
        example_inputs: a tuple of positional arguments, a dict of keyword arguments, or a pair of both; synthesised
            where left out.
        dump_dir: a directory that receives every stage as text.
        progress: called with the name of each pass as it starts.

    Raises:
        AutoshardError: with what is wrong, where, and what to do.
    """
    options = make_options(
        world,
        tp=tp,
        dp_shard=dp_shard,
        dp_replicate=dp_replicate,
        batch=batch,
        sequence=sequence,
        dtype=dtype,
        device=device,
        memory=memory,
        devices_per_node=devices_per_node,
        interconnect=interconnect,
        global_batch=global_batch,
        optimizer=optimizer,
        mixed_precision=mixed_precision,
        masters=masters,
        tp_reduce_dtype=tp_reduce_dtype,
        checkpointing=checkpointing,
        sequence_parallel=sequence_parallel,
        logits=logits,
        overrides=overrides,
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
    checkpointing: str | None = None,
    compile: bool = False,
    compile_backend: str | Callable[..., Any] | None = None,
    masters: torch.dtype | None = None,
    tp_reduce_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Apply a plan to a model, in place, on every rank of a process group.

    Args:
        model: the model the plan was made for.
        plan: a plan, its dict, or a path to its file.
        optimizer: optimizers made before, which end on the sharded parameters, changed in place; or functions that
            make one of the sharded model's named parameters, such as ``torch.optim.AdamW``: see ``optimizers``.
        mixed_precision: ``"bfloat16"`` computes in bfloat16, and reduces and keeps parameters in float32; or torch's
            ``MixedPrecisionPolicy``, taken as it is; as the plan says where left out.
        offload: keep parameters, gradients and optimizer state on the host between uses.
        checkpointing: recompute ``"none"`` of each block's activations in backward, ``"selective"``: all but matmuls
            and attention, or ``"full"``; as the plan says where left out.
        compile: compile each block, in place.
        compile_backend: torch.compile's backend, ``"inductor"`` where left out.
        masters: ``torch.float32`` keeps float32 parameters and optimizer state for a bfloat16 or float16 model, each
            rank its own part; the forward stays in ``mixed_precision``, or in the model's own dtype; as the plan says
            where left out.
        tp_reduce_dtype: such as ``torch.float32``: what each rank has in part is summed over tp in it, and rounded
            once to the dtype it had; that dtype itself where left out and the plan says no other.

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

    training = Training(
        mixed_precision, offload, checkpointing or "none", compile, compile_backend, masters, tp_reduce_dtype
    )
    ensure_process_group(offload)
    made = read_plan(plan)
    if checkpointing is None:
        training = replace(training, checkpointing=made.checkpointing)
    said: Any = made.workload.tp_reduced
    if tp_reduce_dtype is None and said is not None:
        training = replace(training, tp_reduce_dtype=getattr(torch, said, said))
    if mixed_precision is None and masters is None and made.workload.reduced is not None:
        own = made.workload.stored is None
        training = replace(
            training,
            mixed_precision=made.workload.dtype if own else None,
            masters=None if own else getattr(torch, made.workload.stored or ""),
        )
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
    checkpointing: str | None = None,
    compile: bool = False,
    compile_backend: str | Callable[..., Any] | None = None,
    masters: torch.dtype | None = None,
    tp_reduce_dtype: torch.dtype | None = None,
    **options: Any,
) -> nn.Module:
    """Plan and apply in one call, under torchrun; takes what ``plan`` and ``parallelize`` take.

    Returns:
        ``model``, changed in place.
    """
    from autoshard.executor.execute import ensure_process_group
    from autoshard.executor.together import together

    ensure_process_group(offload)
    if plan is None:
        narrow = mixed_precision.param_dtype if isinstance(mixed_precision, MixedPrecisionPolicy) else mixed_precision
        wanted = {
            "mixed_precision": _plain(narrow),
            "masters": _plain(masters),
            "tp_reduce_dtype": _plain(tp_reduce_dtype),
            "checkpointing": checkpointing,
            "optimizer": _kind(optimizer),
        }
        plan = together(lambda: _make_plan(model, world, **(wanted | options)))
    return parallelize(
        model,
        plan,
        optimizer=optimizer,
        mixed_precision=mixed_precision,
        offload=offload,
        checkpointing=checkpointing,
        compile=compile,
        compile_backend=compile_backend,
        masters=masters,
        tp_reduce_dtype=tp_reduce_dtype,
    )


_make_plan = plan


def _plain(dtype: object) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _kind(wanted: Wanted) -> str:
    """Return which optimizer that plans know keeps as much as ``wanted``; two moments where it is none of them."""
    made = [one for one in (wanted if isinstance(wanted, (list, tuple)) else [wanted]) if one is not None]
    plain = [one for one in made if isinstance(one, torch.optim.SGD)]
    if not made or len(plain) < len(made):
        return "adamw"
    return "sgd-momentum" if any(group["momentum"] for one in plain for group in one.param_groups) else "sgd"


__all__ = ["auto_parallelize", "parallelize", "plan"]
