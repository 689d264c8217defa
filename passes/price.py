"""What a placed model needs and takes on a mesh: the equations of ``cost`` with the numbers of a profile.

Reads the profile, the collectives and the cluster. Decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sympy.polys.rings import PolyElement

from autoshard import cost
from autoshard.cluster import Cluster
from autoshard.passes.extents import at
from autoshard.passes.profile import Profile, UnitProfile
from autoshard.passes.traffic import Sent, collectives
from autoshard.passes.weights import MOMENTS, Bytes, Weight, share
from autoshard.plans import AXES, Collective, Mesh, Workload


@dataclass(frozen=True)
class Price:
    """One mesh and way to train, priced.

    Attributes:
        mesh: its degrees.
        checkpointing: ``none``, ``selective`` or ``full``.
        reshard: whether FSDP frees a unit's parameters after its forward.
        memory: bytes on rank 0 by kind, each at its own largest.
        peak: bytes on rank 0 at the worst moment.
        when: that moment.
        seconds: of one step, by part.
        collectives: of one step.
    """

    mesh: Mesh
    checkpointing: str
    reshard: bool
    memory: dict[str, int]
    peak: int
    when: str
    seconds: dict[str, float]
    collectives: tuple[Collective, ...]

    @property
    def step(self) -> float:
        """Seconds of one step."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Pricing:
    """What pricing needs to know of one tp degree.

    Attributes:
        tp: the degree.
        profile: what a step costs there.
        sent: what conversions send.
        buffers: bytes of buffers on one rank.
        main: the dtype that ``workload.dtype`` stands for.
        cluster: the devices.
    """

    tp: int
    profile: Profile
    sent: tuple[Sent, ...]
    buffers: int
    main: str
    cluster: Cluster
    _units: dict[Any, list[cost.Unit]] = field(default_factory=dict, compare=False, repr=False)

    def units(self, mesh: Mesh, workload: Workload, batch: Any = None, sequence: Any = None) -> list[cost.Unit]:
        """Return the sizes of every unit; ``batch`` and ``sequence`` may be symbols in place of the workload's.

        They are the same for every way to train, and made once.
        """
        key = (mesh, workload, batch or workload.batch, sequence or workload.sequence)
        if key not in self._units:
            self._units[key] = self._made(*key)
        return self._units[key]

    def _made(self, mesh: Mesh, workload: Workload, batch: Any, sequence: Any) -> list[cost.Unit]:
        known: dict[tuple[int, int, int], cost.Unit] = {}
        found = []
        for unit in self.profile.units:
            key = (id(unit.kept), id(unit.flops), id(unit.weights))
            if key not in known:
                known[key] = self._unit(unit, mesh, workload, batch, sequence)
            found.append(replace(known[key], name=unit.module))
        return found

    def _unit(self, unit: UnitProfile, mesh: Mesh, workload: Workload, batch: Any, sequence: Any) -> cost.Unit:
        sizes = [(w, Bytes.of(w, workload, self.main), share(w, mesh.dp_shard) * mesh.dp_shard) for w in unit.weights]
        sharded = mesh.data > 1 or any(size.gathered != size.stored for _, size, _ in sizes)
        made = evaluated(unit, sizes, workload, lambda size: at(size, batch, sequence, mesh.tp))
        return made if sharded else replace(made, gathered=0, reduced=0)

    def loss(self, mesh: Mesh, workload: Workload, batch: Any = None, sequence: Any = None) -> Any:
        """Return the bytes that the loss holds."""
        logits = at(self.profile.logits, batch or workload.batch, sequence or workload.sequence, mesh.tp)
        return cost.loss_bytes(logits, self.profile.cut_logits)

    def run(self, mesh: Mesh, workload: Workload, checkpointing: str, reshard: bool) -> Price:
        """Price one mesh and way to train."""
        units, loss = self.units(mesh, workload), self.loss(mesh, workload)
        moments = cost.moments(units, loss, checkpointing, mesh.dp_shard, reshard)
        when, beside = max(moments, key=lambda moment: moment[1])
        state = cost.state_bytes(units, mesh.dp_shard)
        sent = collectives(self.sent, self.profile, mesh, workload, self.main, checkpointing != "none", reshard)
        return Price(
            mesh,
            checkpointing,
            reshard,
            self._memory(units, loss, mesh, checkpointing, reshard),
            round(state + beside) + self.buffers,
            when,
            self._seconds(units, sent, mesh, workload, checkpointing),
            sent,
        )

    def max_batch(self, mesh: Mesh, workload: Workload, checkpointing: str, reshard: bool, budget: int) -> int:
        """Return the most sequences of a data rank that fit ``budget`` bytes; 0 where not even one does.

        Every moment of equation 8 is linear in B, so that two values of each give the B at which it meets the budget.
        """
        units = [self.units(mesh, workload, batch) for batch in (1, 2)]
        values = [
            [size for _, size in cost.moments(u, self.loss(mesh, workload, b), checkpointing, mesh.dp_shard, reshard)]
            for b, u in enumerate(units, 1)
        ]
        room = budget - self.buffers - cost.state_bytes(units[0], mesh.dp_shard)
        most = math.inf
        for one, two in zip(*values, strict=True):
            if one > room:
                return 0
            if two > one:
                most = min(most, 1 + (room - one) / (two - one))
        return int(most) if most < math.inf else workload.batch

    def _memory(
        self, units: Sequence[cost.Unit], loss: Any, mesh: Mesh, checkpointing: str, reshard: bool
    ) -> dict[str, int]:
        s = mesh.dp_shard
        inner = [cost.gathered_bytes(u) for u in units if not u.root]
        root = sum(cost.gathered_bytes(u) for u in units if u.root)
        found = {
            "parameters": sum(u.parameters for u in units) / s,
            "gradients": cost.gradient_bytes(units, s),
            "optimizer": sum(u.optimizer for u in units) / s,
            "buffers": self.buffers,
            "gathered units": root + (2 * max(inner, default=0) if reshard else sum(inner)),
            "activations": sum(cost.kept_bytes(u, checkpointing) for u in units),
            "loss": loss,
        }
        return {name: round(size) for name, size in found.items()}

    def _seconds(
        self,
        units: Sequence[cost.Unit],
        sent: Sequence[Collective],
        mesh: Mesh,
        workload: Workload,
        checkpointing: str,
    ) -> dict[str, float]:
        cluster = self.cluster
        rate = cluster.device.peak(workload.dtype) * self._sustained(cost.MATMUL)
        memory = cluster.device.memory_bandwidth * self._sustained(cost.MEMORY)
        compute = cost.compute_seconds(units, checkpointing, rate, memory)
        tp = sum(self.collective_seconds(c, mesh) for c in sent if c.axis == "tp")
        data = [c for c in sent if c.axis != "tp"]
        total = sum(self.collective_seconds(c, mesh) for c in data)
        ends = total / max(1, max((c.count for c in data), default=1))
        optimizer = cost.optimizer_seconds(units, mesh.dp_shard, memory)
        step = cost.step_seconds(compute, tp, total, ends, optimizer, cluster.overlaps)
        return {"compute": compute, "tp": tp, "data": step - compute - tp - optimizer, "optimizer": optimizer}

    def collective_seconds(self, one: Collective, mesh: Mesh) -> float:
        """Return the seconds of all collectives of one kind."""
        n, apart = self.axis(one.axis, mesh)
        cluster, share = self.cluster, self._sustained(cost.NETWORK)
        link, network = share * cluster.link_bandwidth, share * cluster.network_bandwidth
        speed, inside = cost.bandwidth(n, apart, cluster.devices_per_node, link, network)
        latency = cluster.link_latency if inside else cluster.network_latency
        return float(cost.ring_seconds(one.op, one.bytes, one.count, n, speed, latency))

    def _sustained(self, share: float) -> float:
        """Return the share of a rate that is sustained: all of one that was measured."""
        return 1.0 if self.cluster.sustained else share

    @staticmethod
    def axis(name: str, mesh: Mesh) -> tuple[int, int]:
        """Return the ranks of an axis, and how far apart they lie: the axis right of it is inside."""
        degrees = [getattr(mesh, axis) for axis in AXES]
        index = AXES.index(name)
        apart = 1
        for degree in degrees[index + 1 :]:
            apart *= degree
        return degrees[index], apart


def evaluated(
    unit: UnitProfile,
    sizes: Sequence[tuple[Weight, Bytes, Any]],
    workload: Workload,
    value: Callable[[PolyElement], Any],
) -> cost.Unit:
    """Return the sizes of a unit whose parameters are gathered and reduced, as numbers or as expressions.

    Args:
        unit: its polynomials.
        sizes: its parameters, their bytes an element, and their elements whole over dp_shard.
        workload: for its optimizer.
        value: what a polynomial is worth.
    """
    trained = [(size, n) for w, size, n in sizes if w.trainable]
    gradients = sum(size.stored * n for size, n in trained)
    return cost.Unit(
        name=unit.module,
        block=unit.block,
        root=not unit.module,
        parameters=sum(size.stored * n for _, size, n in sizes),
        gradients=gradients,
        optimizer=MOMENTS[workload.optimizer] * gradients,
        gathered=sum(size.gathered * n for _, size, n in sizes),
        reduced=sum(size.reduced * n for size, n in trained),
        kept=value(unit.kept),
        dear=value(unit.dear),
        entered=value(unit.entered),
        beyond=value(unit.beyond),
        early=value(unit.early),
        flops=value(unit.flops),
        moved=value(unit.moved),
        launches=unit.launches,
    )
