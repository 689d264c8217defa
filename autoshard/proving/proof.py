"""What a verification found: torch-free data that shows itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autoshard.plans import Mesh

#: What one process cannot show.
NOT_PROVED = "not proved here: dropout; FSDP and the optimizer, for which there is --processes"
#: What a short run on processes cannot show either.
NOT_PROVED_IN_PROCESSES = "not proved here: dropout, other devices than the CPU, other dtypes"


@dataclass(frozen=True)
class Culprit:
    """A fact of the plan that explains what is wrong.

    Attributes:
        kind: ``gradient sum``, ``entry``, ``reduce``, ``bias``, ``part``, ``tie``, ``size`` or ``value``; of hand plans
            also ``rule`` (it cannot be followed), ``nonlinear`` and ``not applied`` (expert parallelism).
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
        mesh: the mesh of real processes it ran on; None where the ranks were simulated.
        updates: on processes, error of what one optimizer step changed, by parameter, relative to a whole step.
    """

    ok: bool
    parameters: Mapping[str, float]
    outputs: Mapping[str, float]
    culprits: tuple[Culprit, ...]
    tp: int
    shrunk: tuple[str, ...]
    tolerance: float
    seconds: float
    mesh: Mesh | None = None
    updates: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        from autoshard.report_proof import render_text

        return render_text(self)

    @property
    def wrong(self) -> dict[str, float]:
        """Return the parameters whose gradient is wrong, worst first."""
        return self.above(self.parameters)

    def above(self, errors: Mapping[str, float]) -> dict[str, float]:
        """Return the errors that do not count as agreement, largest first."""
        found = {name: error for name, error in errors.items() if not error <= self.tolerance}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def not_proved(self) -> str:
        """What this proof says nothing about."""
        return NOT_PROVED if self.mesh is None else NOT_PROVED_IN_PROCESSES

    def to_json(self) -> str:
        """Return the proof as JSON text; errors that are not finite are strings."""
        data: dict[str, Any] = {**asdict(self), "not_proved": self.not_proved}
        return json.dumps(_plain(data), indent=1) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
