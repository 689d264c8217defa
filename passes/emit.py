"""Write the plan: every fact with its reason, repeated modules folded.

Reads the placed cuts, the FSDP units and the mesh. Decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.dtypes import dtype_bytes
from autoshard.folding import fold_refusals, split_number
from autoshard.ir import Tensor
from autoshard.passes.draws import find_draws
from autoshard.passes.modules import module_plans, replaced
from autoshard.passes.notes import assumptions, coverage, warnings
from autoshard.passes.occurrence import Division
from autoshard.passes.price import Price
from autoshard.passes.returns import find_returns
from autoshard.passes.states import Placed
from autoshard.passes.weights import members
from autoshard.passes.whys import Whys
from autoshard.patterns import fold
from autoshard.plans import (
    GradSum,
    Mesh,
    MeshChoice,
    Plan,
    Refusal,
    Replacement,
    TensorPlan,
    Unit,
    Workload,
)


@dataclass(frozen=True)
class Emit:
    """Turn a placed model into a plan.

    Attributes:
        price: what the model needs and takes on the chosen mesh.
        workload: what a step computes.
        units: names of the FSDP units' modules.
        device: its name.
        why_mesh: why the mesh, one sentence.
        meshes: every mesh that was looked at.
        refused: what was sent back.
        replacements: modules of torch that are replaced.
        in_training: what draws random numbers in training only.
        advice: what would help where nothing fits.
    """

    price: Price
    workload: Workload
    units: tuple[str, ...]
    device: str = ""
    why_mesh: str = ""
    meshes: tuple[MeshChoice, ...] = ()
    refused: tuple[Refusal, ...] = field(default=())
    replacements: tuple[Replacement, ...] = ()
    in_training: Mapping[str, int] = field(default_factory=dict)
    advice: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh:
        """The chosen mesh."""
        return self.price.mesh

    def run(self, placed: Placed) -> Plan:
        """Return the plan."""
        traced = placed.chosen.factored.traced
        whys = Whys(placed)
        parameters = self._tensors(placed, traced.parameters, whys, sharded=True)
        buffers = self._tensors(placed, traced.buffers, whys, sharded=False)
        untraced = [Refusal(u.fqn or "the model", u.where, u.why) for u in traced.untraced] if self.mesh.tp > 1 else []
        refused = fold_refusals([*placed.chosen.refused, *self.refused, *untraced])
        draws = find_draws(placed, self.in_training)
        modules = module_plans(placed, parameters, whys, draws.modules, find_returns(placed))
        return Plan(
            mesh=self.mesh,
            parameters=parameters,
            buffers=buffers,
            modules=modules,
            units=self._units(members(self.units, traced.parameters), parameters),
            memory_bytes=self.price.memory,
            collectives=self.price.collectives,
            coverage=coverage(placed, parameters, self.workload),
            workload=self.workload,
            peak_bytes=self.price.peak,
            peak_when=self.price.when,
            step_seconds=self.price.seconds,
            checkpointing=self.price.checkpointing,
            reshard=self.price.reshard,
            device=self.device,
            why_mesh=self.why_mesh,
            meshes=self.meshes,
            assumptions=assumptions(placed),
            warnings=(*self.advice, *warnings(placed, draws)),
            refused=refused,
            replacements=replaced(self.replacements, modules),
            sequence=placed.sequence.arguments,
            model=traced.model,
        )

    def _tensors(self, placed: Placed, tensors: Iterable[Tensor], whys: Whys, sharded: bool) -> dict[str, TensorPlan]:
        found: dict[str, TensorPlan] = {}
        for tensor in tensors:
            division, why = whys.of(tensor)
            held = None if division is None or division.mixed else division
            shape = list(tensor.meta.shape)
            if held is not None:
                shape[held.dim] //= self.mesh.tp
            shard = 0 if sharded and self.mesh.dp_shard > 1 and shape else None
            if shard is not None:
                shape[0] = -(-shape[0] // self.mesh.dp_shard)
            mixed = division is not None and division.mixed
            summed = sharded and tensor.trainable and (mixed or tensor.fqn in placed.grad_sums)
            for name in tensor.names:
                found[name] = TensorPlan(
                    shape=tensor.meta.shape,
                    dtype=tensor.meta.dtype,
                    tp_dim=held.dim if held else None,
                    tp_parts=None if held is None or held.even else tuple((o, n) for o, n, _ in held.pieces),
                    tp_copies=1 if held else self.mesh.tp,
                    grad_sum=GradSum(self.mesh.tp) if summed else None,
                    fsdp_dim=shard,
                    local_shape=tuple(shape),
                    why=why,
                    read=_read(placed, tensor.fqn, mixed),
                    trainable=tensor.trainable,
                    tied_to=None if name == tensor.fqn else tensor.fqn,
                    **(_slices(division) if division is not None and mixed else {}),
                )
        return found

    def _units(self, members: list[tuple[str, ...]], parameters: Mapping[str, TensorPlan]) -> tuple[Unit, ...]:
        rows = []
        for unit, fqns in zip(self.units, members, strict=True):
            size = sum(_gathered(parameters[fqn], self.mesh) for fqn in fqns)
            rows.append((unit, len(fqns), size))
        grouped: dict[tuple[str, str, int, int], list[int]] = {}
        for unit, number, size in rows:
            prefix, index, suffix = split_number(unit)
            grouped.setdefault((prefix, suffix, number, size), []).append(-1 if index is None else index)
        found = []
        for (prefix, suffix, number, size), indices in grouped.items():
            name = prefix + (fold(indices) if indices != [-1] else "") + suffix
            found.append(Unit(name, number, size))
        return tuple(found)


def _gathered(tensor: TensorPlan, mesh: Mesh) -> int:
    """Return the bytes of a tensor on one tp rank when FSDP has gathered it."""
    shape = list(tensor.shape)
    if tensor.tp_dim is not None:
        shape[tensor.tp_dim] //= mesh.tp
    return math.prod(shape) * dtype_bytes(tensor.dtype)


def _read(placed: Placed, fqn: str, mixed: bool) -> str:
    if mixed:
        return "slice"
    return "first_rank" if fqn in placed.first_rank else "local"


def _slices(division: Division) -> dict[str, Any]:
    """Return what each rank reads of a parameter only some parts of which are cut."""
    return {
        "slice_dim": division.dim,
        "slices": tuple((offset, length, max(ways, 1)) for offset, length, ways in division.pieces),
    }
