"""Group the model's modules into FSDP units: one per repeated block, one per large module besides, the root last.

Reads the traced graph. Decides which modules' parameters are gathered and freed together. A module can only be a unit
if it is called, and if nothing outside its calls reads its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import chain

from autoshard.ir import Tensor, Traced


@dataclass(frozen=True)
class Wrap:
    """Find the FSDP units of a traced model."""

    def run(self, traced: Traced) -> tuple[str, ...]:
        """Return the units' module names, innermost first; ``""`` is the root, last."""
        homes, readers = _homes(traced), _readers(traced)
        blocks = [c for c in chain(*traced.containers) if homes.get(c) and _sound(traced, c, homes, readers)]
        large = [m for m in _large(traced, blocks) if _sound(traced, m, homes, readers)]
        return (*blocks, *large, "")


def _inside(fqn: str, module: str) -> bool:
    return fqn == module or fqn.startswith(module + ".")


def _homes(traced: Traced) -> dict[str, list[Tensor]]:
    """Return, by module name, the parameters that live in it or below it."""
    homes: dict[str, list[Tensor]] = defaultdict(list)
    for parameter in traced.parameters:
        for outer in _outer(parameter.fqn.rpartition(".")[0]):
            homes[outer].append(parameter)
    return homes


def _readers(traced: Traced) -> dict[str, list[tuple[int, ...]]]:
    """Return, by value, the calls around each op that reads it."""
    found: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for op in traced.ops:
        for name in op.refs():
            found[name].append(op.calls)
    return found


def _sound(
    traced: Traced, module: str, homes: dict[str, list[Tensor]], readers: dict[str, list[tuple[int, ...]]]
) -> bool:
    """Whether the module is called, and nothing outside its calls reads or names its parameters."""
    if any(outer in traced.sometimes for outer in _outer(module)):
        return False  # ranks of which some gather it and some do not would wait for each other
    calls = {call.id for call in traced.calls if call.fqn == module}
    own = homes.get(module, ())
    if not calls or any(not _inside(name, module) for tensor in own for name in tensor.names):
        return False
    return all(calls & set(around) for tensor in own if tensor.value for around in readers[tensor.value])


def _large(traced: Traced, blocks: list[str]) -> list[str]:
    """Return modules outside the blocks whose own parameters weigh at least half a block."""
    numel: dict[str, int] = defaultdict(int)
    in_blocks, known = 0, set(blocks)
    for parameter in traced.parameters:
        home = parameter.fqn.rpartition(".")[0]
        if any(outer in known for outer in _outer(home)):
            in_blocks += parameter.meta.numel
        else:
            numel[home] += parameter.meta.numel
    if not blocks:
        return []
    return [module for module, count in numel.items() if module and count * 2 * len(blocks) >= in_blocks]


def _outer(module: str) -> list[str]:
    """Return the module's name and those of the modules around it."""
    pieces = module.split(".")
    return [".".join(pieces[: i + 1]) for i in range(len(pieces))]
