"""Whether a cut pays: the products it divides against the activations it moves.

Per token, with ``m`` multiply-adds of the matrices that are cut and ``e`` elements of the values that are converted at
their two ends, ``F`` sustained FLOP/s, ``B`` bytes/s of the link each way and ``tp`` ranks:

    (1)  time saved   = 3 * 2 m * (1 - 1/tp) / F      forward and backward are three products of one size
    (2)  time spent   = 2 * 2 e * (1 - 1/tp) / B      a ring all-reduce moves 2 (tp - 1)/tp of its 2-byte elements

so that a cut pays where ``m / e > 2 F / (3 B)``, whatever tp is (``BREAK_EVEN``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoshard.ir import Meta
from autoshard.passes.factors import Factor, count
from autoshard.passes.occurrence import Occurrences

#: NVIDIA H100 SXM data sheet: 989e12 dense bf16 FLOP/s; 40 % of it sustained is an assumption.
_FLOPS = 0.4 * 989e12
#: The same sheet: NVLink at 900e9 bytes/s both ways together; 80 % of one way reached is an assumption.
_LINK = 0.8 * 450e9
BREAK_EVEN = 2 * _FLOPS / (3 * _LINK)
#: What is below this share of the parameter bytes is left whole where its cut does not pay.
SMALL = 0.01


def too_small(index: Occurrences, leaves: frozenset[Factor], touched: Iterable[str], saved_bytes: int) -> str | None:
    """Return why a cut of few parameters does not pay; None where it does, or where its memory counts.

    Args:
        index: the graph.
        leaves: the factors that are cut.
        touched: values that hold a cut dim.
        saved_bytes: parameter bytes that are divided.
    """
    if saved_bytes > SMALL * index.parameter_bytes:
        return None
    products, moved = _traffic(index, leaves, set(touched))
    if not moved or products / moved > BREAK_EVEN:
        return None
    return f"it is small: {products / moved:.0f} products for each element moved, below the {BREAK_EVEN:.0f} that pay"


def _traffic(index: Occurrences, leaves: frozenset[Factor], touched: set[str]) -> tuple[int, int]:
    """Return the multiply-adds of the matmuls that are cut, and the elements of the values that enter and leave."""
    products = 0
    moved = 0
    entering: dict[str, int] = {}
    over = {name for leaf in leaves for name, _, kind in index.contracted.get(leaf, ()) if kind == "matmul"}
    for name in over | touched:
        op = index.ops.get(name)
        if op is None:
            continue
        kinds = [(factor, kind) for factor, kind in index.contracting.get(name, ()) if kind == "matmul"]
        if not kinds or not isinstance(op.result, Meta):
            continue
        summed = any(count(factor, leaves) for factor, _ in kinds)
        products += op.result.numel * math.prod(factor.size for factor, _ in kinds)
        if summed:
            moved += op.result.numel
        else:
            for ref in op.refs():
                made = index.ops.get(ref)
                if ref not in touched and ref not in index.by_value and made is not None:
                    entering[ref] = made.result.numel if isinstance(made.result, Meta) else 0
    return products, moved + sum(entering.values())
