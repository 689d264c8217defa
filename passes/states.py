"""What placing decides: the state of every value on the tp axis, and the conversions at module boundaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from autoshard.ir import Op
from autoshard.passes.cut import Chosen
from autoshard.passes.inside import Text
from autoshard.plans import Refusal
from autoshard.rewrite.record import CallRewrite


class State(Enum):
    """What the ranks of the tp axis hold of a value."""

    R = "R"
    V = "V"
    S = "S"
    P = "P"


@dataclass(frozen=True)
class Conversion:
    """A change of state at a module boundary.

    Attributes:
        call: id of the module call.
        fqn: the module.
        side: ``inputs``, ``outputs``, or ``inside`` the module's own code.
        path: argument or output path.
        kind: ``"R->V"``, ``"P->R"``, ``"S(d)->R"``; or the first right behind another: ``"P->V"``, ``"S(d)->V"``;
            ``"S(d)->D"`` for what stays cut and says so; ``"S(d)->L"`` and ``"S(d)->LD"`` for losses of it.
        value: the converted value.
        share: name of the entry this is part of, where several modules enter with one value.
        why: the reason, one sentence.
        text: the expression that is converted inside the code.
    """

    call: int
    fqn: str
    side: str
    path: str
    kind: str
    value: str
    why: str
    share: str | None = None
    text: Text | None = None


@dataclass(frozen=True)
class Stretches:
    """Values that are whole between regions, and cut along the sequence in training.

    Attributes:
        dims: the cut dim of each, by value; negative.
        conversions: in place of those at the same boundary; ``kind`` is ``""`` where there is none while they are cut.
        returns: conversion by ``returns:`` and output path or ``takes:`` and argument, by module, of what the model may
            hand out.
        parameters: those that work on the rank's part of the sequence: their gradients are partial.
        arguments: arguments of the model, with the dim, whose length tp must divide.
        notes: what was given up, one sentence each.
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    conversions: tuple[Conversion, ...] = ()
    returns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    arguments: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    """States and conversions for a set of cuts.

    Attributes:
        states: per value.
        grad_sums: reason by name of each parameter whose gradient is partial.
        first_rank: names of biases that are added to a partial sum.
        lookups: argument with the row numbers, by name of a module with a row-cut table.
        refused: cuts that cannot be carried out, by key.
        settings: attributes that are set so that sizes in the user's code become local, by ``(module, attribute)``.
        rewrites: arguments in the code of a module that are written otherwise, for the same, by module.
        resizable: whether such attributes and rewrites were not looked for yet.
        sequence: what is cut along the sequence in training.
        logits: values that stay cut along their last dim in training, up to a loss or to what the model returns.
        losses: the cross-entropies of those, which each rank works out on its share.
        joined: of ``logits``, those that are made whole where the model returns them.
    """

    chosen: Chosen
    states: Mapping[str, State]
    conversions: tuple[Conversion, ...]
    grad_sums: Mapping[str, str]
    first_rank: frozenset[str]
    lookups: Mapping[str, str]
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    settings: Mapping[tuple[str, str], int] = field(default_factory=dict)
    rewrites: Mapping[str, tuple[CallRewrite, ...]] = field(default_factory=dict)
    resizable: bool = True
    sequence: Stretches = Stretches()
    logits: frozenset[str] = frozenset()
    losses: frozenset[str] = frozenset()
    joined: frozenset[str] = frozenset()

    def in_training(self) -> list[Conversion]:
        """Return the conversions while the sequence is cut."""
        cut = {(c.call, c.side, c.path): c for c in self.sequence.conversions}
        kept = [c for c in self.conversions if c.side == "inside" or (c.call, c.side, c.path) not in cut]
        return [*kept, *(c for c in self.sequence.conversions if c.kind)]


class Refused(Exception):
    """A cut cannot be carried out at an op.

    Attributes:
        values: those whose cuts are to blame.
        inside: whether a conversion inside a module's code would help.
        sums: ops whose partial sums would have to be reduced where they are made.
    """

    def __init__(
        self, op: Op, why: str, values: Iterable[str] = (), inside: bool = False, sums: Iterable[str] = ()
    ) -> None:
        super().__init__(why)
        self.inside = inside
        self.sums = frozenset(sums)
        self.op = op
        self.why = why
        self.values = [op.name, *op.refs(), *values]
