"""Say which fact of a plan explains a wrong number.

Values and gradients at module boundaries tell how the ranks make up the whole: *whole* on each, *cut* among them, a
*sum* over them, or *wrong*. A wrong value right behind a sum was not reduced; a gradient that is a sum where the
module's own gradient is right was not summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from autoshard.passes.factorise import Factored
from autoshard.passes.factors import Factor, find, flat
from autoshard.proving.analysis import Analysis
from autoshard.proving.observe import Key, Observed, Tolerance, relation
from autoshard.proving.proof import Culprit
from autoshard.proving.subject import Cut

_ENTRY = "what it returns goes on to work that is divided, and its gradient is not summed over the ranks (R->V)"


@dataclass(frozen=True)
class Sides:
    """The same run twice: whole, and on the ranks."""

    wants: Observed
    gots: Observed
    want_gradients: dict[str, list[Tensor] | None]
    got_gradients: dict[str, list[Tensor] | None]
    cuts: Mapping[str, Cut]
    world: int
    exact: Tolerance


def diagnose(model: nn.Module, analysis: Analysis, sides: Sides) -> tuple[Culprit, ...]:
    """Return what explains the difference, the most specific first; ``model`` is the untouched one."""
    found = [*_ties(model, sides), *_unsummed(sides), *_forward(model, analysis, sides)]
    if not found:
        found += _backward(sides)
    if not found:
        # every sum over a value's gradient is made, later on: the sums over these parameters are what is missing
        found += _unsummed(sides, inside=True)
    return tuple(dict.fromkeys(found))


def _ties(model: nn.Module, sides: Sides) -> Iterator[Culprit]:
    groups: dict[int, list[str]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(fqn)
    for names in groups.values():
        gradients = [sides.got_gradients.get(name) for name in names]
        if len(names) > 1 and any(not _same(g, gradients[0]) for g in gradients[1:]):
            yield Culprit("tie", names[0], f"it is tied to {', '.join(names[1:])}, and under the plan it is not")


def _same(a: list[Tensor] | None, b: list[Tensor] | None) -> bool:
    if a is None or b is None:
        return a is b
    return all(x.shape == y.shape and bool((x == y).all()) for x, y in zip(a, b, strict=True))


def _unsummed(sides: Sides, inside: bool = False) -> Iterator[Culprit]:
    """Whole parameters whose ranks' gradients add up to the right one, while what came back to the module was right.

    Inside of divided work a sum may come back to the module, and rightly so.
    """
    for fqn, ranks in sides.got_gradients.items():
        want = sides.want_gradients.get(fqn)
        if want is None or ranks is None or sides.cuts.get(fqn, Cut()).dim is not None:
            continue
        if relation(ranks, want[0], sides.exact) != "sum":
            continue
        module = fqn.rpartition(".")[0]
        back = {_of(sides, key, gradients=True) for key in sides.wants.gradients if key[0] == module}
        if back <= {"whole", "cut", *(["sum"] if inside else [])}:
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


def _forward(model: nn.Module, analysis: Analysis, sides: Sides) -> Iterator[Culprit]:
    """The first wrong value in execution order, and the fact before it that explains it."""
    previous: Key | None = None
    for key in sides.wants.values:
        state = _of(sides, key)
        if state != "wrong":
            previous = key if state == "sum" else previous
            continue
        yield from _explain(model, analysis, sides, key, previous)
        return


def _explain(model: nn.Module, analysis: Analysis, sides: Sides, key: Key, summand: Key | None) -> Iterator[Culprit]:
    module = key[0]
    crossed = [] if analysis.factored is None else list(_crossed(analysis.factored, sides.cuts))
    yield from crossed
    bias = _doubled_bias(model, sides, key)
    if bias:
        yield Culprit("bias", bias, f"it is added {sides.world} times: once on every rank of a partial sum")
    elif summand and not crossed:
        yield Culprit("reduce", summand[0], "it returns a partial sum that nothing adds up (P->R)")
    elif not crossed:
        yield Culprit("value", module, "the first value that is wrong, in execution order, is what it returns")


def _crossed(factored: Factored, cuts: Mapping[str, Cut]) -> Iterator[Culprit]:
    """Parameters cut in one run although their rows are parts laid end to end."""
    for tensor in factored.traced.parameters:
        cut = cuts.get(tensor.fqn, Cut())
        if cut.dim is None or cut.parts is not None or tensor.value is None:
            continue
        number = _parts(find(factored.single(tensor.value)[cut.dim]))
        if number > 1:
            why = f"its dim {cut.dim} is {number} parts laid end to end, and the cut crosses them"
            op = next((op for op in factored.traced.ops if tensor.value in op.refs()), None)
            yield Culprit("part", tensor.fqn, why, op.where if op else "")


def _parts(dim: Factor) -> int:
    if dim.kind == "concatenation":
        return len(dim.children)
    first = flat(dim)[0]
    numbers = any("numbers the parts" in reason.why for reason in first.blocks)
    return first.size if dim.kind == "product" and numbers else 1


def _doubled_bias(model: nn.Module, sides: Sides, key: Key) -> str | None:
    """Return the bias whose extra copies are exactly the difference."""
    module = model.get_submodule(key[0])
    ranks, want = sides.gots.values.get(key, []), sides.wants.values[key][0]
    for name, bias in module._parameters.items():
        if bias is None or not ranks or ranks[0].shape != want.shape or bias.dim() != 1:
            continue
        extra = (sides.world - 1) * bias.detach()
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
