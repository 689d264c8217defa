"""Choose the mesh: the smallest tp whose bytes per rank fit the memory, data parallel over the rest.

Reads the world, the pinned degrees and the bytes of each candidate. The rule is simple and stated; a cost model that
prices communication and compute replaces it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoshard.errors import MeshMismatch
from autoshard.plans import AXES, Mesh, MeshChoice

#: The share of a device's memory that a plan may fill: the rest is for the allocator's slack and the runtime.
MARGIN = 0.9


@dataclass(frozen=True)
class ChooseMesh:
    """Choose among the factorisations of a world.

    Attributes:
        world: number of ranks.
        tp: pinned degree, or None.
        dp_shard: pinned degree, or None.
        dp_replicate: pinned degree, or None.
        memory_bytes: memory of one device.
        devices_per_node: tp stays inside a node.
    """

    world: int
    tp: int | None = None
    dp_shard: int | None = None
    dp_replicate: int | None = None
    memory_bytes: int = 80 * 2**30
    devices_per_node: int = 8

    def run(self, total_bytes: Callable[[Mesh], int]) -> tuple[Mesh, str, tuple[MeshChoice, ...]]:
        """Return the mesh, why, and every mesh that was looked at.

        Args:
            total_bytes: bytes per rank of the plan on a mesh.

        Raises:
            MeshMismatch: the pinned degrees do not multiply to the world.
        """
        choices: list[MeshChoice] = []
        budget = int(self.memory_bytes * MARGIN)
        for mesh in self.candidates():
            need = total_bytes(mesh)
            fits = need <= budget
            verdict = "fits" if fits else f"needs {need / 2**30:.1f} GiB of {budget / 2**30:.1f}"
            choices.append(MeshChoice(mesh, need, verdict))
            if fits:
                break
        fitting = [c for c in choices if c.verdict == "fits"]
        best = fitting[0] if fitting else min(choices, key=lambda c: c.total_bytes)
        return best.mesh, self._why(best, bool(fitting)), tuple(choices)

    def candidates(self) -> list[Mesh]:
        """Return the meshes in order of preference: smaller tp first, inside one node."""
        self.check()
        if self.tp is not None:
            degrees = [self.tp]
        else:
            used = (self.dp_shard or 1) * (self.dp_replicate or 1)
            rest = self.world // used
            if self.dp_shard is not None and self.dp_replicate is not None:
                degrees = [rest]
            else:
                degrees = [d for d in range(1, rest + 1) if rest % d == 0 and d <= self.devices_per_node]
        return [self._mesh(tp) for tp in degrees]

    def _mesh(self, tp: int) -> Mesh:
        replicate = self.dp_replicate
        if replicate is None:
            replicate = 1 if self.dp_shard is None else self.world // (tp * self.dp_shard)
        shard = self.dp_shard if self.dp_shard is not None else self.world // (tp * replicate)
        return Mesh(replicate, shard, tp)

    def check(self) -> None:
        """Raise ``MeshMismatch`` unless the pinned degrees can multiply to the world."""
        pinned = {name: getattr(self, name) for name in AXES if getattr(self, name) is not None}
        for name, degree in [("world", self.world), *pinned.items()]:
            if degree < 1:
                raise MeshMismatch(f"{name} is {degree}", got=f"{name}={degree}; allowed: 1 or more")
        product = 1
        for degree in pinned.values():
            product *= degree
        if self.world % product or (len(pinned) == 3 and product != self.world):
            given = " x ".join(f"{name}={degree}" for name, degree in pinned.items())
            allowed = ", ".join(str(d) for d in range(1, self.world + 1) if self.world % d == 0)
            raise MeshMismatch(
                f"a world of {self.world} does not divide by {product}",
                got=f"{given}; allowed: degrees whose product is {self.world} (divisors: {allowed})",
                help="leave one degree out: it is what remains",
            )

    def _why(self, best: MeshChoice, fits: bool) -> str:
        budget = f"{self.memory_bytes * MARGIN / 2**30:.0f} GiB ({MARGIN:.0%} of a device)"
        need = f"{best.total_bytes / 2**30:.2f} GiB a rank"
        pinned = [name for name in AXES if getattr(self, name) is not None]
        if not fits:
            return f"nothing fits {budget}: {need} is the least; add devices, or lower the batch or sequence"
        if "tp" in pinned:
            return f"tp is pinned; {need} fit {budget}"
        return f"the smallest tp, inside a node, that fits: {need} of {budget}"
