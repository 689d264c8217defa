"""Which argument that was not given an error of the forward speaks of."""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from types import FrameType, TracebackType


def missing_arguments(error: BaseException, absent: list[str]) -> list[str]:
    """Return the absent arguments that the error names, or that are None on the lines that it came through."""
    text = str(error)
    named = [name for name in absent if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text)]
    found = sorted(named, key=text.index)
    if "None" in text:
        for frame, line in reversed(list(_frames(error.__traceback__))):
            names = [name for name in absent if name in frame.f_locals and frame.f_locals[name] is None]
            found += [name for name in names if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", line)]
    return list(dict.fromkeys(found))


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, str]]:
    """Yield each frame with the source of the statement that it was in."""
    while traceback is not None:
        code = traceback.tb_frame.f_code
        positions = list(code.co_positions())[traceback.tb_lasti // 2]
        first, last = positions[0] or traceback.tb_lineno, positions[1] or traceback.tb_lineno
        yield (
            traceback.tb_frame,
            " ".join(linecache.getline(code.co_filename, line) for line in range(first, last + 1)),
        )
        traceback = traceback.tb_next
