"""Other settings of one model, and its cost written out: what ``explain --what-if`` and ``--formula`` show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.cluster import Cluster
from autoshard.errors import InvalidArgument
from autoshard.options import make_options
from autoshard.passes.formula import Formulas, write_out
from autoshard.pipeline import Options, run
from autoshard.plans import MeshChoice

SETTINGS = ("world", "batch", "sequence", "global_batch", "device")


def what_if(
    model: nn.Module,
    name: str,
    values: Sequence[Any],
    world: int | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> list[tuple[Any, MeshChoice]]:
    """Return the best mesh for each value of a setting; the model is traced once.

    Args:
        model: any module.
        name: one of ``SETTINGS``.
        values: of it.
        world: number of ranks, where that is not the setting.
        progress: called with the name of each pass as it starts.
        options: as for ``plan``.

    Raises:
        InvalidArgument: the setting is not known.
    """
    if name not in SETTINGS:
        raise InvalidArgument(f"no setting is called {name!r}", got=f"{name!r}; allowed: {', '.join(SETTINGS)}")
    base = make_options(values[0] if name == "world" else world, **options)
    asked = [_changed(base, name, value) for value in values]
    _, stages = run(model, asked[0], progress)
    found = []
    for value, one in zip(values, asked, strict=True):
        pricer = stages.pricer.under(one.workload(stages.traced), one.cluster)
        found.append((value, one.meshes().run(pricer)[0]))
    return found


def formulas(
    model: nn.Module,
    world: int | None = None,
    *,
    progress: Callable[[str], None] | None = None,
    **options: Any,
) -> Formulas:
    """Return the cost of a model's plan written out in B, T, t, s and r.

    Args:
        model: any module.
        world: number of ranks.
        progress: called with the name of each pass as it starts.
        options: as for ``plan``.
    """
    plan, stages = run(model, make_options(world, **options), progress)
    return write_out(stages.pricing, plan.workload, plan.checkpointing, plan.reshard)


def _changed(options: Options, name: str, value: Any) -> Options:
    if name == "device":
        return replace(options, cluster=Cluster.of(value))
    return replace(options, **{name: value})
