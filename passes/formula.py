"""The model of cost written out for one model: expressions in B, T, t, s and r that a person can read.

The same functions of ``cost`` that price a mesh with numbers, given symbols. Rows that a degree does not divide are
taken as divided: the numbers of a plan count what padding adds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.polys.domains import ZZ
from sympy.polys.rings import ring

from autoshard import cost
from autoshard.passes.extents import at
from autoshard.passes.price import Pricing, evaluated
from autoshard.passes.profile import UnitProfile
from autoshard.passes.weights import Bytes
from autoshard.plans import Workload

#: sequences per data rank, tokens per sequence, and the degrees of tp, dp_shard and dp_replicate
B, T, t, s, r = sympy.symbols("B T t s r", positive=True)
_RING, _B, _T, _U, _V = ring("B,T,u,v", ZZ)  # u = 1/t, v = 1/s


@dataclass(frozen=True)
class _Degree:
    """A degree whose inverse is a generator of the ring: sums of many terms are much faster there than in sympy."""

    inverse: Any

    def __pow__(self, exponent: int) -> _Degree:
        return _Degree(self.inverse**exponent)

    def __rtruediv__(self, size: Any) -> Any:
        return size * self.inverse


_t, _s = _Degree(_U), _Degree(_V)


@dataclass(frozen=True)
class Formulas:
    """Expressions of one rank.

    Attributes:
        tp: the degree that was placed; t stands for any that cuts the same.
        memory: bytes by kind, and ``peak``: the largest of the moments.
        moments: bytes beside parameters and optimizer state, by moment.
        sent: bytes by axis and collective of one step.
        flops: of matmuls and attention in one forward.
    """

    tp: int
    memory: Mapping[str, sympy.Expr]
    moments: Mapping[str, sympy.Expr]
    sent: Mapping[str, sympy.Expr]
    flops: sympy.Expr

    def value(self, expression: sympy.Expr, **numbers: int) -> float:
        """Return an expression's value, such as ``value(f.flops, B=1, T=4096, t=8, s=1, r=1)``."""
        symbols = {symbol.name: symbol for symbol in (B, T, t, s, r)}
        return float(expression.subs({symbols[name]: number for name, number in numbers.items()}))


def write_out(pricing: Pricing, workload: Workload, checkpointing: str, reshard: bool = True) -> Formulas:
    """Write out the cost of a placed model, with parameters sharded over s > 1 ranks.

    Args:
        pricing: what pricing needs to know of a tp degree; t stands for any degree that cuts the same.
        workload: for its dtypes and optimizer.
        checkpointing: ``none``, ``selective`` or ``full``.
        reshard: whether FSDP frees a unit's parameters after its forward.
    """
    units = [_unit(unit, workload, pricing.main) for unit in pricing.profile.units]
    loss = cost.loss_bytes(at(pricing.profile.logits, _B, _T, _t), pricing.profile.cut_logits)
    moments = {name: _text(size) for name, size in cost.moments(units, loss, checkpointing, _s, reshard)}
    state = _text(cost.state_bytes(units, _s))
    memory = {
        "parameters": _text(sum(u.parameters for u in units) / _s),
        "gradients": _text(cost.gradient_bytes(units, _s)),
        "optimizer": _text(sum(u.optimizer for u in units) / _s),
        "activations": _text(sum(cost.kept_bytes(u, checkpointing) for u in units)),
        "loss": _text(loss),
        "peak": state + cost.largest(list(dict.fromkeys(moments.values()))),
    }
    sent: dict[str, Any] = {}
    for one in pricing.sent:
        times = one.times * (2 if one.again and checkpointing != "none" else 1)
        sent[f"tp {one.op}"] = sent.get(f"tp {one.op}", 0) + times * at(one.size, _B, _T, _t)
    reduced = sum(u.reduced for u in units)
    sent |= {
        "dp_shard all_gather": sum((2 if reshard and not u.root else 1) * u.gathered for u in units),
        "dp_shard reduce_scatter": reduced,
        "dp_replicate all_reduce": reduced / _s,
    }
    flops = _text(sum(u.flops for u in units))
    return Formulas(pricing.tp, memory, moments, {name: _text(size) for name, size in sent.items()}, flops)


def _text(size: Any) -> sympy.Expr:
    """Return a polynomial of the ring as an expression in B, T, t and s."""
    return sympy.sympify(size) if isinstance(size, int) else size.as_expr(B, T, 1 / t, 1 / s)


def _unit(unit: UnitProfile, workload: Workload, main: str) -> cost.Unit:
    sizes = [(w, Bytes.of(w, workload, main), at(w.elements, _B, _T, _t)) for w in unit.weights]
    return evaluated(unit, sizes, workload, lambda size: at(size, _B, _T, _t))
