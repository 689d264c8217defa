"""Say why a mesh was chosen, and what would help where none fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.cost import MARGIN
from autoshard.passes.choose_mesh import CHECKPOINTING, TIE, Asked, ChooseMesh, Prices
from autoshard.plans import AXES, MeshChoice, Workload
from autoshard.words import human_bytes, percent

#: how many times as many devices are looked at
_MOST = 1024


def explain_choice(choices: Sequence[MeshChoice], meshes: ChooseMesh, device: str) -> str:
    """Return one sentence: why the first choice was taken of all."""
    best = choices[0]
    budget = f"{human_bytes(meshes.budget)} ({percent(MARGIN)} of {device})"
    if not best.fits:
        return f"nothing fits {budget}: {human_bytes(best.total_bytes)} is the least"
    pinned = [name for name in AXES if getattr(meshes, name) is not None]
    fits = f"{human_bytes(best.total_bytes)} of {budget}"
    if len(choices) == 1:
        return f"{' and '.join(pinned) or 'the world'} leaves no other; it fits: {fits}"
    others = [c for c in choices[1:] if c.fits]
    if not others:
        return f"the only mesh that fits: {fits}"
    fastest = max(c.tokens_per_second for c in choices if c.fits)
    if best.tokens_per_second < fastest:
        return f"the simplest of those within {percent(TIE)} of the fastest; it fits: {fits}"
    return f"the fastest that fits: {fits}"


def advise(best: MeshChoice, meshes: ChooseMesh, prices: Prices, workload: Workload) -> tuple[str, ...]:
    """Say what would make a model fit that does not: one sentence each, the least change first."""
    if best.fits:
        return ()
    found = []
    way = Asked(best.mesh, best.batch, best.checkpointing, best.reshard, best.sequence_parallel)
    largest = prices.max_batch(way, meshes.budget)
    if largest:
        found.append(f"a batch of {largest} sequences a data rank would fit {best.mesh}")
    world = _smallest_world(meshes, prices)
    if world is not None:
        found.append(f"{world.mesh.world} devices would do: {world.mesh}, {human_bytes(world.total_bytes)} a rank")
    held = prices.price(way).memory
    if best.checkpointing != CHECKPOINTING[-1]:
        found.append('checkpointing="full" keeps less for backward')
    if held["optimizer"] and best.total_bytes - held["optimizer"] <= meshes.budget:
        found.append(
            f"an optimizer without state would fit: {workload.optimizer} keeps {human_bytes(held['optimizer'])}"
        )
    if best.total_bytes - held["loss"] <= meshes.budget:
        found.append(
            f'a loss in chunks of the sequence, or under tp on logits="sharded", would fit: it takes '
            f"{human_bytes(held['loss'])}"
        )
    host = sum(held[kind] for kind in ("parameters", "gradients", "optimizer"))
    if best.total_bytes - host <= meshes.budget:
        found.append(f"offload=True keeps {human_bytes(host)} on the host between uses")
    if world is None:
        found.append(
            "no number of devices makes it fit at this batch and sequence: that takes another axis, pipeline, context "
            "or expert parallelism, which autoshard does not do"
        )
    return tuple(found)


def _smallest_world(meshes: ChooseMesh, prices: Prices) -> MeshChoice | None:
    """Return the choice for the smallest larger world that fits, by powers of two up to ``_MOST`` times as large."""
    times = 2
    while times <= _MOST:
        # replicas hold what they held: only wider sharding needs less
        larger = replace(meshes, world=meshes.world * times, dp_shard=None, dp_replicate=1)
        if meshes.global_batch is None or meshes.global_batch % (larger.world // (meshes.tp or 1)) == 0:
            best = larger.run(prices)[0]
            if best.fits:
                return best
        times *= 2
    return None
