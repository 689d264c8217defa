"""What the sweep over the zoo finds for one type: frozen, one JSON line each."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Left:
    """A weight of a matmul that every tp rank holds whole.

    Attributes:
        pattern: its name, folded over numbered siblings.
        share: of the model's parameter bytes, in [0, 1].
        why: the plan's reason.
    """

    pattern: str
    share: float
    why: str


@dataclass(frozen=True)
class Agreement:
    """An inferred plan held beside a hand plan, at the same tp.

    Attributes:
        verdict: ``same``, ``better``, ``worse`` or ``different``.
        why: what the two differ in, and the inferred plan's own reasons; empty where they are the same.
        cut_bytes: bytes of traced parameters that the inferred plan cuts.
        hand_cut_bytes: the same of the hand plan.
        moved_bytes: bytes of activations that the inferred plan's conversions move, forward and backward.
        hand_moved_bytes: the same of the hand plan.
    """

    verdict: str
    why: str
    cut_bytes: int
    hand_cut_bytes: int
    moved_bytes: int
    hand_moved_bytes: int


@dataclass(frozen=True)
class Row:
    """One type.

    Attributes:
        type: transformers' ``model_type``.
        stage: how far it came: ``not run`` (the model's own forward fails), ``no plan``, ``planned``, ``time-out``,
            ``died``.
        error: what stopped it, one line.
        traced: share of parameter bytes that the trace uses.
        parameters: share of parameter bytes that is cut.
        matmuls: share of the bytes of weights in traced matmuls that is cut.
        unknown: uses of each operator without a rule.
        left: weights of matmuls left whole, largest first.
        opaque: modules whose own code could not be traced, and why.
        untraced: parameters that are not in the trace.
        verified: ``exact``, ``wrong``, ``failed`` (the proof raised) or ``not asked``.
        proof: what is wrong or failed, one line.
        agreement: with the hand plan; None where the type has none.
        seconds: to plan and to verify.
        code: what version of the code found this.
    """

    type: str
    stage: str
    error: str = ""
    traced: float = 0.0
    parameters: float = 0.0
    matmuls: float = 0.0
    unknown: tuple[tuple[str, int], ...] = ()
    left: tuple[Left, ...] = ()
    opaque: tuple[str, ...] = ()
    untraced: tuple[Left, ...] = ()
    verified: str = "not asked"
    proof: str = ""
    agreement: Agreement | None = None
    seconds: float = 0.0
    code: str = ""

    def to_json(self) -> str:
        """Return the row on one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Row:
        """Read what ``to_json`` wrote."""
        data: dict[str, Any] = json.loads(line)
        agreement = data["agreement"]
        return Row(
            **{
                **data,
                "unknown": tuple((op, uses) for op, uses in data["unknown"]),
                "left": tuple(Left(**each) for each in data["left"]),
                "opaque": tuple(data["opaque"]),
                "untraced": tuple(Left(**each) for each in data["untraced"]),
                "agreement": None if agreement is None else Agreement(**agreement),
            }
        )
