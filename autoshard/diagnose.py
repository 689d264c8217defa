"""Say which fact of a plan explains a wrong number.

Values and gradients at module boundaries tell how the ranks make up the whole: *whole* on each, *cut* among them, a
*sum* over them, or *wrong*. A wrong value right behind a sum was not reduced; a gradient that is a sum where the
module's own gradient is right was not summed.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from autoshard.exported import user_place
from autoshard.observe import Key, Observed, Tolerance, relation
from autoshard.passes.factors import Factor, find, flat
from autoshard.pipeline import Stages
from autoshard.proof import Culprit
from autoshard.specimen import Specimen

_ENTRY = "what it returns goes on to work that is divided, and its gradient is not summed over the ranks (R->V)"
_OWN = os.sep + "autoshard" + os.sep


@dataclass(frozen=True)
class Sides:
    """The same run twice: whole, and on the ranks."""

    wants: Observed
    gots: Observed
    want_gradients: dict[str, list[Tensor] | None]
    got_gradients: dict[str, list[Tensor] | None]
    exact: Tolerance


def diagnose(specimen: Specimen, stages: Stages, sides: Sides) -> tuple[Culprit, ...]:
    """Return what explains the difference, the most specific first."""
    found = [
        *_ties(specimen, sides),
        *_unsummed(specimen, sides),
        *_forward(specimen, stages, sides),
    ]
    if not found:
        found += _backward(sides)
    return tuple(dict.fromkeys(found))


def failure(error: Exception) -> Culprit:
    """Return the culprit of a forward that fails on the ranks' shares."""
    stack = "".join(traceback.format_tb(error.__traceback__))
    own = "\n".join(line for line in stack.splitlines() if _OWN not in line)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return Culprit("size", "", f"the forward fails on a rank's share: {first}"[:300], user_place(own))


def _ties(specimen: Specimen, sides: Sides) -> Iterator[Culprit]:
    groups: dict[int, list[str]] = {}
    for fqn, parameter in specimen.model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(fqn)
    for names in groups.values():
        gradients = [sides.got_gradients.get(name) for name in names]
        if len(names) > 1 and any(g is None or not _same(g, gradients[0]) for g in gradients[1:]):
            yield Culprit("tie", names[0], f"it is tied to {', '.join(names[1:])}, and under the plan it is not")


def _same(a: list[Tensor], b: list[Tensor] | None) -> bool:
    return b is not None and all(x.shape == y.shape and bool((x == y).all()) for x, y in zip(a, b, strict=True))


def _unsummed(specimen: Specimen, sides: Sides) -> Iterator[Culprit]:
    """Whole parameters whose ranks' gradients add up to the right one, while what came back to the module was right."""
    for fqn, ranks in sides.got_gradients.items():
        want = sides.want_gradients.get(fqn)
        if want is None or ranks is None or specimen.plan.parameters[fqn].tp_dim is not None:
            continue
        if relation(ranks, want[0], sides.exact) != "sum":
            continue
        module = fqn.rpartition(".")[0]
        back = {_of(sides, key, gradients=True) for key in sides.wants.gradients if key[0] == module}
        if back <= {"whole", "cut"}:
            yield Culprit(
                "gradient sum", fqn, "each rank has only a part of its gradient: it needs a sum over tp (grad_sum)"
            )


def _of(sides: Sides, key: Key, gradients: bool = False) -> str:
    wants, gots = (
        (sides.wants.gradients, sides.gots.gradients) if gradients else (sides.wants.values, sides.gots.values)
    )
    if key not in gots:
        return "wrong"
    return relation(gots[key], wants[key][0], sides.exact)


def _forward(specimen: Specimen, stages: Stages, sides: Sides) -> Iterator[Culprit]:
    """The first wrong value in execution order, and the fact before it that explains it."""
    previous: Key | None = None
    for key in sides.wants.values:
        state = _of(sides, key)
        if state != "wrong":
            previous = key if state == "sum" else previous
            continue
        yield from _explain(specimen, stages, sides, key, previous)
        return


def _explain(specimen: Specimen, stages: Stages, sides: Sides, key: Key, summand: Key | None) -> Iterator[Culprit]:
    module = key[0]
    crossed = list(_crossed(specimen, stages))
    yield from crossed
    bias = _doubled_bias(specimen, sides, key)
    if bias:
        yield Culprit("bias", bias, f"it is added {specimen.plan.mesh.tp} times: once on every rank of a partial sum")
    elif summand and not crossed:
        yield Culprit("reduce", summand[0], "it returns a partial sum that nothing adds up (P->R)")
    elif not crossed:
        yield Culprit("value", module, "the first value that is wrong, in execution order, is what it returns")


def _crossed(specimen: Specimen, stages: Stages) -> Iterator[Culprit]:
    """Parameters cut in one run although their rows are parts laid end to end."""
    factored = stages.factored
    for tensor in factored.traced.parameters:
        plan = specimen.plan.parameters.get(tensor.fqn)
        if plan is None or plan.tp_dim is None or plan.tp_parts is not None or tensor.value is None:
            continue
        dim = find(factored.single(tensor.value)[plan.tp_dim])
        number = _parts(dim)
        if number > 1:
            why = f"its dim {plan.tp_dim} is {number} parts laid end to end, and the cut crosses them"
            op = next((op for op in factored.traced.ops if tensor.value in op.refs()), None)
            yield Culprit("part", tensor.fqn, why, op.where if op else "")


def _parts(dim: Factor) -> int:
    if dim.kind == "concatenation":
        return len(dim.children)
    first = flat(dim)[0]
    numbers = any("numbers the parts" in reason.why for reason in first.blocks)
    return first.size if dim.kind == "product" and numbers else 1


def _doubled_bias(specimen: Specimen, sides: Sides, key: Key) -> str | None:
    """Return the bias whose extra copies are exactly the difference."""
    module = specimen.model.get_submodule(key[0])
    ranks, want = sides.gots.values.get(key, []), sides.wants.values[key][0]
    for name, bias in module._parameters.items():
        if bias is None or not ranks or ranks[0].shape != want.shape or bias.dim() != 1:
            continue
        extra = (specimen.plan.mesh.tp - 1) * bias.detach()
        if want.shape[-1:] == bias.shape and sides.exact.equal(ranks[0] - extra, want):
            return f"{key[0]}.{name}" if key[0] else name
    return None


def _backward(sides: Sides) -> Iterator[Culprit]:
    """The first wrong gradient in backward order; if a sum stands right behind it, that is where it enters a region."""
    behind: Key | None = None
    for key in sides.wants.gradients:  # in order of arrival: backward order
        state = _of(sides, key, gradients=True)
        if state == "sum" and _of(sides, key) == "whole":
            behind = behind or key
        elif state == "wrong":
            yield Culprit("entry", (behind or key)[0], _ENTRY)
            return
        else:
            behind = None
    if behind:
        yield Culprit("entry", behind[0], _ENTRY)
