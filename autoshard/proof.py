"""What a verification found: torch-free data that shows itself."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: What one process cannot show.
NOT_PROVED = "not proved here: FSDP, the optimizer, dropout (run with processes for those)"


@dataclass(frozen=True)
class Culprit:
    """A fact of the plan that explains what is wrong.

    Attributes:
        kind: ``gradient sum``, ``entry``, ``reduce``, ``bias``, ``part``, ``tie``, ``size`` or ``value``.
        fqn: the parameter or module it is about.
        why: one sentence.
        where: the user's ``file:line``, if it is known.
    """

    kind: str
    fqn: str
    why: str
    where: str = ""


@dataclass(frozen=True)
class Proof:
    """A plan held against the untouched model.

    Attributes:
        ok: whether every output and every gradient agrees.
        parameters: error of each parameter's gradient, relative to its largest magnitude.
        outputs: error of each output.
        culprits: what explains the errors, the most specific first.
        tp: number of simulated ranks.
        shrunk: what was made smaller, and other remarks.
        tolerance: errors up to it count as agreement.
        seconds: how long it took.
    """

    ok: bool
    parameters: Mapping[str, float]
    outputs: Mapping[str, float]
    culprits: tuple[Culprit, ...]
    tp: int
    shrunk: tuple[str, ...]
    tolerance: float
    seconds: float

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        from autoshard.report_proof import render_text

        return render_text(self)

    @property
    def wrong(self) -> dict[str, float]:
        """Return the parameters whose gradient is wrong, worst first."""
        found = {fqn: error for fqn, error in self.parameters.items() if not error <= self.tolerance}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def to_json(self) -> str:
        """Return the proof as JSON text; infinite errors are strings."""
        data: dict[str, Any] = {**asdict(self), "not_proved": NOT_PROVED}
        return json.dumps(_plain(data), indent=1) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "inf"
    return value
