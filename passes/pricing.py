"""Price meshes: one profile for each tensor-parallel degree, looked at under every workload and way to train."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autoshard.cluster import Cluster
from autoshard.dtypes import dtype_bytes
from autoshard.passes.choose_mesh import Asked
from autoshard.passes.homes import Homes
from autoshard.passes.price import Price, Pricing
from autoshard.passes.profile import profile
from autoshard.passes.states import Placed
from autoshard.passes.traffic import activations
from autoshard.plans import Workload


@dataclass(frozen=True)
class Pricer:
    """Prices meshes of one model.

    Attributes:
        place: returns the placed cuts for a tp degree.
        along: returns the same with the sequence cut between regions, as far as the graph allows.
        homes: the ops of the FSDP units.
        workload: what a step computes.
        cluster: the devices.
    """

    place: Callable[[int], Placed]
    along: Callable[[Placed], Placed]
    homes: Homes
    workload: Workload
    cluster: Cluster
    _known: dict[tuple[int, bool], Pricing] = field(default_factory=dict, compare=False, repr=False)

    def price(self, asked: Asked) -> Price:
        """Return the price of a mesh and way to train."""
        workload = replace(self.workload, batch=asked.batch)
        return self.of(asked.mesh.tp, asked.sequence).run(asked.mesh, workload, asked.checkpointing, asked.reshard)

    def max_batch(self, asked: Asked, budget: int) -> int:
        """Return the most sequences of a data rank that fit a number of bytes."""
        pricing = self.of(asked.mesh.tp, asked.sequence)
        return pricing.max_batch(asked.mesh, self.workload, asked.checkpointing, asked.reshard, budget)

    def under(self, workload: Workload, cluster: Cluster) -> Pricer:
        """Return what prices the same model under another workload or on other devices."""
        return Pricer(self.place, self.along, self.homes, workload, cluster)

    def useful(self, tp: int) -> bool:
        """Whether anything can be cut over a degree."""
        return bool(self.place(tp).chosen.cuts)

    def of(self, tp: int, sequence: bool = False) -> Pricing:
        """Return what pricing needs to know of a degree."""
        if (tp, sequence) not in self._known:
            placed = self.place(tp)
            self._known[tp, sequence] = self.made(self.along(placed) if sequence else placed)
        return self._known[tp, sequence]

    def forget(self, tp: int) -> None:
        """Look at the placed cuts of a degree anew when it is priced again: they changed."""
        self._known.pop((tp, False), None)
        self._known.pop((tp, True), None)

    def made(self, placed: Placed) -> Pricing:
        """Return what pricing needs to know of placed cuts."""
        found = profile(placed, self.homes, self.workload)
        sent = activations(placed, found, self.homes.main, self.workload)
        return Pricing(placed.chosen.degree, found, sent, _buffer_bytes(placed), self.homes.main, self.cluster)


def _buffer_bytes(placed: Placed) -> int:
    total = 0
    for buffer in placed.chosen.factored.traced.buffers:
        division = placed.chosen.divisions.get(buffer.fqn)
        cut = placed.chosen.degree if division is not None and not division.mixed else 1
        total += math.prod(buffer.meta.shape) * dtype_bytes(buffer.meta.dtype) // cut
    return total
