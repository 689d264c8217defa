"""Every error a user can meet.

::

    AutoshardError                what went wrong, where, got/allowed, what to do
    |-- InvalidArgument           an option, a plan or an override that cannot be used   (ValueError)
    |   |-- MeshMismatch          degrees that do not multiply to the world
    |   |-- IndivisibleHeads      attention heads that the pinned tp does not divide
    |   |-- UnknownModule         a module or parameter name the model does not have
    |   `-- TargetError           a command-line target that names no model, or several
    |-- InputsNotFound            no example input could be made for the forward
    |-- TraceError                the forward could not be traced
    |-- CoverageTooLow            less of the model is cut over tp than the user asked for
    |-- PlanMismatch              a plan that was made for another model
    |-- AlreadyParallelized       the model was sharded before
    |-- NotDistributed            no process group, and no torchrun environment to make one
    |-- RanksDisagree             another rank refused, or made another plan
    |-- OptimizerError            an optimizer that cannot follow its parameters
    |-- NonFiniteGradients        a gradient norm that is nan or infinite                (RuntimeError)
    |-- ProcessFailed             a process that a verification started died, or did not answer
    `-- Unusable                  applying failed half-way; the model must be built again
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AutoshardError(Exception):
    """A refusal in the user's terms: one sentence, and up to three lines that place it and say what to do.

    Args:
        what: one lower-case sentence with its numbers.
        at: where: a module name, and the user's ``file:line`` if it is known.
        got: what was met and what would be allowed.
        help: what the user can do.
    """

    def __init__(self, what: str, *, at: str | None = None, got: str | None = None, help: str | None = None) -> None:
        self.what = what
        self.at = at
        self.got = got
        self.help = help
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (("at", self.at), ("got", self.got), ("help", self.help)):
            if text:
                lines.append(f"{label:>5}: {text}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.at, self.got, self.help))


def _rebuild(
    kind: type[AutoshardError], what: str, at: str | None, got: str | None, help: str | None
) -> AutoshardError:
    """Unpickle an error whose constructor takes keywords."""
    return kind(what, at=at, got=got, help=help)


class InvalidArgument(AutoshardError, ValueError):
    """An option, a plan or an override that cannot be used."""


class MeshMismatch(InvalidArgument):
    """Degrees that do not multiply to the world."""


class IndivisibleHeads(InvalidArgument):
    """Attention heads that the pinned tensor-parallel degree does not divide."""


class UnknownModule(InvalidArgument):
    """A module or parameter name that the model does not have."""


class TargetError(InvalidArgument):
    """A command-line target that names no model, or several."""


class InputsNotFound(AutoshardError):
    """No example input could be made for the model's forward."""


class TraceError(AutoshardError):
    """The model's forward could not be traced."""


class CoverageTooLow(AutoshardError):
    """Less of the model is cut over tp than the user asked for."""


class PlanMismatch(AutoshardError, ValueError):
    """A plan that was made for another model."""


class AlreadyParallelized(AutoshardError):
    """The model was parallelized before."""


class NotDistributed(AutoshardError):
    """There is no process group, and no torchrun environment to make one from."""


class RanksDisagree(AutoshardError):
    """Another rank refused, or made another plan."""


class OptimizerError(AutoshardError):
    """An optimizer that cannot follow its parameters to the sharded model."""


class NonFiniteGradients(AutoshardError, RuntimeError):
    """A gradient norm that is nan or infinite, where the caller asked for an error."""


class ProcessFailed(AutoshardError):
    """A process that a verification started died, or did not answer."""


class Unusable(AutoshardError):
    """Applying a plan failed half-way: the model must be built again."""


def near(name: str, known: Iterable[str]) -> str:
    """Return a help sentence with the names closest to ``name``, or the first few known ones."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:5]
    return "did you mean " + ", ".join(close) + "?" if close else "there are none"
