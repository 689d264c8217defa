"""Group the model's modules into FSDP units: one per repeated block, one per large module besides, the root last.

Reads the traced graph. Decides which modules' parameters are gathered and freed together. A module can only be a unit
if it is called, and if nothing outside its calls reads its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from autoshard.ir import Traced


@dataclass(frozen=True)
class Wrap:
    """Find the FSDP units of a traced model."""

    def run(self, traced: Traced) -> tuple[str, ...]:
        """Return the units' module names, innermost first; ``""`` is the root, last."""
        homes = _homes(traced)
        blocks = [c for children in traced.containers for c in children if _sound(traced, c, homes) and homes.get(c)]
        rest = _large(traced, blocks)
        return (*blocks, *(m for m in rest if _sound(traced, m, homes)), "")


def _inside(fqn: str, module: str) -> bool:
    return fqn == module or fqn.startswith(module + ".")


def _homes(traced: Traced) -> dict[str, list[str]]:
    """Return, by module name, the parameters that live in it or below it (first names)."""
    homes: dict[str, list[str]] = defaultdict(list)
    for parameter in traced.parameters:
        pieces = parameter.fqn.split(".")[:-1]
        for i in range(1, len(pieces) + 1):
            homes[".".join(pieces[:i])].append(parameter.fqn)
    return homes


def _sound(traced: Traced, module: str, homes: dict[str, list[str]]) -> bool:
    calls = {call.id for call in traced.calls if call.fqn == module}
    if not calls:
        return False
    own = set(homes.get(module, ()))
    values = {p.value for p in traced.parameters if p.fqn in own and p.value}
    tied_outside = any(p.fqn in own and any(not _inside(name, module) for name in p.names) for p in traced.parameters)
    if tied_outside:
        return False
    return all(calls & set(op.calls) for op in traced.ops if values & set(op.refs()))


def _large(traced: Traced, blocks: list[str]) -> list[str]:
    """Return modules outside the blocks whose own parameters weigh at least half a block."""
    numel: dict[str, int] = defaultdict(int)
    in_blocks = 0
    for parameter in traced.parameters:
        if any(_inside(parameter.fqn, block) for block in blocks):
            in_blocks += parameter.meta.numel
        else:
            numel[parameter.fqn.rpartition(".")[0]] += parameter.meta.numel
    if not blocks:
        return []
    return [module for module, count in numel.items() if module and count * 2 * len(blocks) >= in_blocks]
