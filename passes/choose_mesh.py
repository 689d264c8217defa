"""Choose the mesh: of every factorisation of the world, the one with the most tokens a second that fits.

Reads the world, the pinned degrees and the price of each mesh. A mesh is priced with every way to train that was not
pinned: the least checkpointing that fits is the fastest. Meshes within ``TIE`` of the fastest count as equally fast;
the simplest of them is taken: fewer axes, then less tensor parallelism, then wider sharding.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Protocol

from autoshard.cost import MARGIN
from autoshard.errors import MeshMismatch
from autoshard.passes.price import Price
from autoshard.plans import AXES, Mesh, MeshChoice
from autoshard.words import human_bytes

#: Meshes whose speed differs by less than this are taken as equally fast: the model of cost is no better.
TIE = 0.03
#: More tp beyond a node is looked at as long as it brings the least bytes below this share of what they were.
_GAIN = 0.9
CHECKPOINTING = ("none", "selective", "full")


@dataclass(frozen=True)
class Asked:
    """How a mesh is asked to be priced.

    Attributes:
        mesh: its degrees.
        batch: sequences per data rank.
        checkpointing: ``none``, ``selective`` or ``full``.
        reshard: whether FSDP frees a unit's parameters after its forward.
        sequence: whether the sequence is cut between regions.
    """

    mesh: Mesh
    batch: int
    checkpointing: str
    reshard: bool
    sequence: bool = False


class Prices(Protocol):
    """What prices the meshes of one model."""

    def price(self, asked: Asked) -> Price:
        """Return what a mesh and way to train needs and takes."""

    def useful(self, tp: int) -> bool:
        """Whether anything can be cut over a tp degree."""

    def max_batch(self, asked: Asked, budget: int) -> int:
        """Return the most sequences of a data rank that fit a number of bytes."""


@dataclass(frozen=True)
class ChooseMesh:
    """Choose among the factorisations of a world.

    Attributes:
        world: number of ranks.
        tp: pinned degree, or None.
        dp_shard: pinned degree, or None.
        dp_replicate: pinned degree, or None.
        memory_bytes: memory of one device.
        devices_per_node: devices that share the fast link.
        batch: sequences per data rank, at most.
        global_batch: sequences of one step over all data ranks, or None.
        sequence: tokens per sequence.
        checkpointing: pinned way, or None.
        reshard: pinned, or None.
        sequence_parallel: pinned, or None.
    """

    world: int
    tp: int | None = None
    dp_shard: int | None = None
    dp_replicate: int | None = None
    memory_bytes: int = 80 * 2**30
    devices_per_node: int = 8
    batch: int = 1
    global_batch: int | None = None
    sequence: int = 2048
    checkpointing: str | None = None
    reshard: bool | None = None
    sequence_parallel: bool | None = None

    @property
    def budget(self) -> int:
        """Bytes of a device that a plan may fill."""
        return int(self.memory_bytes * MARGIN)

    def run(self, prices: Prices) -> tuple[MeshChoice, ...]:
        """Return every mesh that was looked at, the chosen one first, then by tokens a second.

        Args:
            prices: what a mesh and way to train needs and takes.

        Raises:
            MeshMismatch: the pinned degrees do not multiply to the world, or no mesh can take the global batch.
        """
        self.check()
        choices: list[MeshChoice] = []
        least, stuck = math.inf, False
        for tp, group in itertools.groupby(self.candidates(), lambda mesh: mesh.tp):
            # beyond a node tp only ever helps what fits in no other way
            far = tp > self.devices_per_node and self.tp is None
            if far and (stuck or any(c.fits for c in choices)):
                break
            made = [self._choice(mesh, prices) for mesh in group]
            choices += made
            smallest = min((c.total_bytes for c in made if c.total_bytes), default=math.inf)
            stuck = smallest > _GAIN * least
            least = min(least, smallest)
        priced = [c for c in choices if c.total_bytes]
        if not priced:
            raise self._no_batch()
        fitting = [c for c in priced if c.fits]
        best = self._simplest(fitting) if fitting else min(priced, key=lambda c: c.total_bytes)
        rest = sorted((c for c in choices if c is not best), key=lambda c: (not c.fits, -c.tokens_per_second))
        return (best, *rest)

    def candidates(self) -> list[Mesh]:
        """Return every mesh that agrees with the pinned degrees, smaller tp first."""
        found = []
        for tp in _divisors(self.world):
            for shard in _divisors(self.world // tp):
                mesh = Mesh(self.world // tp // shard, shard, tp)
                if all(getattr(self, axis) in (None, getattr(mesh, axis)) for axis in AXES):
                    found.append(mesh)
        return found

    def _choice(self, mesh: Mesh, prices: Prices) -> MeshChoice:
        if mesh.tp > 1 and self.tp is None and not prices.useful(mesh.tp):
            return MeshChoice(mesh, 0, f"nothing can be cut over tp={mesh.tp}")
        batch, why = self._batch(mesh)
        if batch == 0:
            return MeshChoice(mesh, 0, why)
        way, best = self._way(Asked(mesh, batch, "none", True), prices)
        fits = best.peak <= self.budget
        verdict = _where_time_goes(best) if fits else f"over {human_bytes(self.budget)}"
        return MeshChoice(
            mesh=mesh,
            total_bytes=best.peak,
            verdict=verdict,
            fits=fits,
            checkpointing=way.checkpointing,
            reshard=way.reshard,
            sequence_parallel=way.sequence,
            batch=batch,
            step_seconds=best.step,
            tokens_per_second=batch * self.sequence * mesh.data / best.step / self.world,
            max_batch=prices.max_batch(way, self.budget),
        )

    def _way(self, asked: Asked, prices: Prices) -> tuple[Asked, Price]:
        """Return the simplest way to train on a mesh that fits, and its price; the smallest where none does.

        Cutting the sequence sends no more and keeps less: it is tried before more checkpointing, which computes more.
        Where the whole sequence fits it stays whole, though a step may be slower: a cut one takes no other lengths than
        multiples of tp.
        """
        tried: list[tuple[Asked, Price]] = []
        for checkpointing in CHECKPOINTING if self.checkpointing is None else (self.checkpointing,):
            for sequence in self._sequences(asked.mesh):
                way = replace(asked, checkpointing=checkpointing, reshard=self.reshard is not False, sequence=sequence)
                tried.append((way, prices.price(way)))
                if tried[-1][1].peak <= self.budget:
                    return self._held(*tried[-1], prices)
        return min(tried, key=lambda one: one[1].peak)

    def _held(self, way: Asked, freed: Price, prices: Prices) -> tuple[Asked, Price]:
        """Return the same with parameters that stay gathered, where that is faster and fits."""
        if self.reshard is None and way.mesh.dp_shard > 1:
            held = prices.price(replace(way, reshard=False))
            if held.peak <= self.budget and held.step < freed.step * (1 - TIE):
                return replace(way, reshard=False), held
        return way, freed

    def _sequences(self, mesh: Mesh) -> tuple[bool, ...]:
        """Return whether the sequence may be cut, the simplest first."""
        if mesh.tp == 1 or self.sequence_parallel is False:
            return (False,)
        return (True,) if self.sequence_parallel else (False, True)

    def _batch(self, mesh: Mesh) -> tuple[int, str]:
        """Return the sequences of each data rank, or 0 and why there can be none."""
        if self.global_batch is None:
            return self.batch, ""
        if self.global_batch % mesh.data:
            return 0, f"a global batch of {self.global_batch} does not divide over {mesh.data} data ranks"
        return self.global_batch // mesh.data, ""

    def _simplest(self, fitting: list[MeshChoice]) -> MeshChoice:
        """Return the simplest of those that are about as fast as the fastest."""
        fastest = max(c.tokens_per_second for c in fitting)
        tied = [c for c in fitting if c.tokens_per_second >= fastest * (1 - TIE)]
        return min(tied, key=lambda c: (_axes(c.mesh), c.mesh.tp, c.mesh.dp_replicate))

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
            allowed = ", ".join(map(str, _divisors(self.world)))
            raise MeshMismatch(
                f"a world of {self.world} does not divide by {product}",
                got=f"{given}; allowed: degrees whose product is {self.world} (divisors: {allowed})",
                help="leave one degree out: it is what remains",
            )

    def _no_batch(self) -> MeshMismatch:
        meshes = self.candidates()
        allowed = sorted({mesh.data for mesh in meshes})
        return MeshMismatch(
            f"no mesh of {self.world} ranks can share out a global batch of {self.global_batch}",
            got=f"--global-batch {self.global_batch}; allowed: a multiple of {', '.join(map(str, allowed))}",
            help="change the batch, or the world",
        )


def _axes(mesh: Mesh) -> int:
    return sum(getattr(mesh, axis) > 1 for axis in AXES)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _where_time_goes(price: Price) -> str:
    """Say what takes the time: compute, collectives of tp and of data parallelism that nothing hides, the optimizer."""
    shares = [(name, round(100 * seconds / price.step)) for name, seconds in price.seconds.items()]
    return ", ".join(f"{name} {share}%" for name, share in shares if share > 1)
