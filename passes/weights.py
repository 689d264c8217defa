"""The parameters of each FSDP unit on one tp rank, and their bytes under a precision and a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from sympy.polys.rings import PolyElement

from autoshard.dtypes import dtype_bytes
from autoshard.ir import Meta, Tensor, Traced
from autoshard.passes.extents import RING, U
from autoshard.passes.occurrence import Division
from autoshard.passes.states import Placed
from autoshard.plans import Workload

#: optimizer state, in copies of the parameters: the moments that each keeps (Kingma and Ba 2015 for Adam)
MOMENTS = {"adamw": 2, "sgd": 0, "sgd-momentum": 1}


@dataclass(frozen=True)
class Weight:
    """One parameter on one tp rank.

    Attributes:
        rows: its first dim; 1 for a scalar.
        rest: the product of its other dims.
        dtype: its own.
        trainable: whether it takes a gradient.
        summed: elements of its gradient that are summed over tp; 0 where it is whole or cut.
        elements: ``rows * rest``, with 1/t.
    """

    rows: int
    rest: int
    dtype: str
    trainable: bool
    summed: int
    elements: PolyElement


@dataclass(frozen=True)
class Bytes:
    """Bytes of an element of a parameter under a workload's precision.

    Attributes:
        stored: as held between steps, and its gradient too.
        gathered: as FSDP gathers it.
        reduced: as its gradient is reduced.
    """

    stored: int
    gathered: int
    reduced: int

    @staticmethod
    def of(weight: Weight, workload: Workload, main: str) -> Bytes:
        """Return them; ``main`` is the dtype that ``workload.dtype`` stands for."""
        own = dtype_bytes(weight.dtype)
        stored = own
        if workload.stored is not None and weight.trainable and weight.dtype == main:
            stored = dtype_bytes(workload.stored)
        if workload.reduced is None:
            return Bytes(stored, stored, stored)
        computed = dtype_bytes(workload.dtype) if weight.dtype == main else own
        return Bytes(stored, computed, dtype_bytes(workload.reduced))


def share(weight: Weight, degree: int) -> int:
    """Return the elements of the largest share of a parameter whose rows are cut over ``degree`` ranks."""
    return -(-weight.rows // degree) * weight.rest


def members(units: Sequence[str], parameters: Iterable[Tensor]) -> list[tuple[str, ...]]:
    """Return the first names of each unit's parameters, in the order of ``units``, ``""`` among them."""
    found: dict[str, list[str]] = {unit: [] for unit in units}
    for tensor in parameters:
        home = tensor.fqn.rpartition(".")[0]
        while home and home not in found:
            home = home.rpartition(".")[0]
        found[home if home in found else ""].append(tensor.fqn)
    return [tuple(found[unit]) for unit in units]


def main_dtype(traced: Traced) -> str:
    """Return the dtype of most parameter bytes."""
    sizes: dict[str, int] = {}
    for parameter in traced.parameters:
        sizes[parameter.meta.dtype] = sizes.get(parameter.meta.dtype, 0) + parameter.meta.numel
    return max(sizes, key=lambda d: sizes[d], default="float32")


def weights(placed: Placed, units: Sequence[str]) -> dict[str, tuple[Weight, ...]]:
    """Return every unit's parameters, each once; units that hold the same have one tuple, so that its id is a key."""
    parameters = {p.fqn: p for p in placed.chosen.factored.traced.parameters}
    divisions, summed = placed.chosen.divisions, {*placed.grad_sums, *placed.sequence.parameters}
    weight = cache(_weight)  # blocks that repeat hold equal ones
    known: dict[tuple[Weight, ...], tuple[Weight, ...]] = {}
    found = {}
    for unit, fqns in zip(units, members(units, parameters.values()), strict=True):
        tensors = (parameters[fqn] for fqn in fqns)
        held = tuple(weight(t.meta, t.trainable, divisions.get(t.fqn), t.fqn in summed) for t in tensors)
        found[unit] = known.setdefault(held, held)
    return found


def _weight(meta: Meta, trainable: bool, division: Division | None, partial: bool) -> Weight:
    """Return a parameter; ``partial`` says that its gradient is, though it is whole or cut."""
    shape = list(meta.shape)
    elements = RING(meta.numel)
    mixed = division is not None and division.mixed
    if division is not None and not mixed:
        shape[division.dim] //= division.degree
        elements = elements * U
    return Weight(
        shape[0] if shape else 1,
        math.prod(shape[1:]),
        meta.dtype,
        trainable,
        meta.numel if trainable and (mixed or partial) else 0,
        elements,
    )
