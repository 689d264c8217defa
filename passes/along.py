"""How the sequence runs through a graph: the dim that it is of each value, and the ops that leave it alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoshard.ir import Op, Ref
from autoshard.passes.cut import Chosen
from autoshard.passes.factors import Factor, find, leaves
from autoshard.passes.rules import VIEWS
from autoshard.passes.rules.opaque import OPAQUE


class Along:
    """One sequence in the values of a graph.

    Attributes:
        sequence: the extent.
        written: values whose memory an op writes to: a conversion would write to a copy.
    """

    def __init__(self, chosen: Chosen, sequence: Factor) -> None:
        self.sequence = sequence
        self.factored = chosen.factored
        self._contracting = chosen.index.contracting
        self._leaves = set(leaves(sequence))
        self._blocking = {block.op for leaf in self._leaves for block in leaf.blocks}
        self._dims: dict[str, int | None] = {}
        self._holds: dict[str, bool] = {}
        self.written = _written(chosen.factored.traced.ops)

    def dim(self, value: str) -> int | None:
        """Return the one dim, counted from the end, that is the sequence; None where it is in none, or elsewhere too.

        Of several tensors, the first one's, and each must have one.
        """
        if value not in self._dims:
            each = [self._dim(dims) for dims in self.factored.tensors(value)]
            self._dims[value] = each[0] if each and None not in each else None
        return self._dims[value]

    def _dim(self, dims: Sequence[Factor]) -> int | None:
        found = [i - len(dims) for i, dim in enumerate(dims) if find(dim) is self.sequence]
        rest = (leaf for dim in dims if find(dim) is not self.sequence for leaf in leaves(dim))
        return found[0] if len(found) == 1 and self._leaves.isdisjoint(rest) else None

    def holds(self, value: str) -> bool:
        """Whether a value has the sequence in it, or a part of it."""
        if value not in self._holds:
            every = (leaf for dims in self.factored.tensors(value) for dim in dims for leaf in leaves(dim))
            self._holds[value] = not self._leaves.isdisjoint(every)
        return self._holds[value]

    def carries(self, op: Op) -> bool:
        """Whether an op treats the sequence as it would a batch: the slice of its result is that of a slice."""
        if op.target == OPAQUE or op.mutates or op.name in self._blocking:
            return False
        if any(not self._leaves.isdisjoint(leaves(f)) for f, _ in self._contracting.get(op.name, ())):
            return False
        given = [name for name in op.refs() if self.holds(name)]
        return bool(given) and all(self.dim(name) is not None for name in (op.name, *given))


def _written(ops: Iterable[Op]) -> frozenset[str]:
    """Return the values that are written in place, and all that share memory with one of them."""
    base: dict[str, str] = {}
    written: set[str] = set()
    for op in ops:
        viewed = op.arguments.get("0") if op.target == "getitem" else op.arguments.get("self")
        if isinstance(viewed, Ref) and (op.target in VIEWS or op.target == "getitem" or "self" in op.mutates):
            base[op.name] = base.get(viewed.name, viewed.name)
        targets = (op.arguments.get(name) for name in op.mutates)
        written |= {base.get(target.name, target.name) for target in targets if isinstance(target, Ref)}
    return frozenset(written | {name for name, root in base.items() if root in written})
