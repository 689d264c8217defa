"""Fold facts that repeat over numbered siblings: ``layers.0.up`` and ``layers.1.up`` become ``layers.{0-1}.up``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from autoshard.patterns import fold
from autoshard.plans import Refusal

_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def split_number(fqn: str) -> tuple[str, int | None, str]:
    """Split a name at its first number: ``layers.3.up`` into ``("layers.", 3, ".up")``; no number gives None."""
    found = _NUMBER.search(fqn)
    if found is None:
        return fqn, None, ""
    return fqn[: found.start(1)], int(found.group(1)), fqn[found.end(1) :]


def fold_strings(texts: Mapping[str, str]) -> dict[str, str]:
    """Fold names with equal texts; a text may name its own sibling's number, which is folded with it."""
    grouped: dict[tuple[str, str, str], list[int]] = {}
    plain: dict[tuple[str, str, str], str] = {}
    for fqn, text in texts.items():
        prefix, number, suffix = split_number(fqn)
        if number is None:
            plain[fqn, "", text] = fqn
            grouped[fqn, "", text] = []
            continue
        own = re.compile(rf"(?<![\w.]){re.escape(prefix)}{number}(?=[.:\"])")
        marked = own.sub(prefix.replace("\\", r"\\") + "{#}", text)
        grouped.setdefault((prefix, suffix, marked), []).append(number)
    found: dict[str, str] = {}
    for (prefix, suffix, text), numbers in grouped.items():
        if not numbers:
            found[prefix] = text
            continue
        folded = fold(sorted(numbers))
        found[prefix + folded + suffix] = text.replace("{#}", folded)
    return found


def fold_refusals(refusals: Sequence[Refusal]) -> tuple[Refusal, ...]:
    """Fold refusals with one reason and place over numbered siblings."""
    texts: dict[str, str] = {}
    for refusal in refusals:
        texts.setdefault(refusal.fqn, f"{refusal.where}|{refusal.why}")
    return tuple(Refusal(fqn, *text.split("|", 1)) for fqn, text in fold_strings(texts).items())
