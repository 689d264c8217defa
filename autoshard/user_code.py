"""Running the user's own code: what it raises becomes a refusal that names its file and line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autoshard.errors import AutoshardError, TargetError

# whatever Python code raises by itself; what is missing here (KeyboardInterrupt, MemoryError) is not about the code
ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turn an exception of the user's code into a refusal.

    Args:
        what: what was run, such as a file or a factory.

    Raises:
        TargetError: the code raised; the cause is chained.
    """
    try:
        yield
    except AutoshardError:
        raise
    except ERRORS as error:
        raise TargetError(
            f"{what} raised {type(error).__name__}: {error}",
            at=_place(error),
            help="run it with python alone first; --traceback shows where it comes from",
        ) from error


def _place(error: BaseException) -> str | None:
    """Return the user's ``file:line`` nearest to the error, or None where there is none."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).parent
    theirs = [one for one in frames if not one.filename.startswith("<") and Path(one.filename).parent != ours]
    return f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else None
