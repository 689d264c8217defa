"""Plans written by hand: a dict of module patterns to style names, or to torch's own ``ParallelStyle`` objects.

Style names become the facts of a plan of ours, so that one executor applies both. Styles that are objects are
literal: torch applies them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from autoshard.errors import InvalidArgument, UnknownModule, near
from autoshard.hand.plan import PlanBuilder
from autoshard.hand.rules import Rules
from autoshard.hand.styles import EXPERT_PARALLEL, STYLES
from autoshard.plans import Plan
from autoshard.proving.proof import Culprit


@dataclass(frozen=True)
class HandPlan:
    """What a hand plan says of one model.

    Attributes:
        plan: the rules with style names, as a tensor-parallel plan of ours; whole where no rule is.
        literal: the rules with style objects, by pattern.
        notes: what was passed over, one sentence each.
        faults: rules that cannot be followed on this model.
    """

    plan: Plan
    literal: Mapping[str, ParallelStyle] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    faults: tuple[Culprit, ...] = ()


def is_hand_plan(plan: Any) -> bool:
    """Whether ``plan`` is a dict of rules, not a plan of ours as data."""
    return isinstance(plan, Mapping) and "schema_version" not in plan


def from_hand(model: nn.Module, plan: Mapping[str, str | ParallelStyle | None], tp: int) -> HandPlan:
    """Read a hand plan for ``model``.

    Args:
        model: on any device, meta included; left as it is.
        plan: pattern to style name, to a ``ParallelStyle``, or to None for no rule.
        tp: number of tensor-parallel ranks.

    Returns:
        The plan. A pattern that names nothing, and a style name that is not known, are notes.

    Raises:
        InvalidArgument: a value is neither a name nor a style.
        UnknownModule: no rule names anything in the model.
    """
    named = {pattern: style for pattern, style in plan.items() if isinstance(style, str)}
    literal = {pattern: style for pattern, style in plan.items() if isinstance(style, ParallelStyle)}
    for pattern, style in plan.items():
        if style is not None and pattern not in named and pattern not in literal:
            raise InvalidArgument(
                f"a rule has a {type(style).__name__} for a style",
                at=pattern,
                got=f"{style!r}; allowed: a style name, or a torch ParallelStyle",
            )
    notes = [f"{pattern}: no style is called {style!r}; passed over" for pattern, style in _unknown(named)]
    known = {p: s for p, s in named.items() if s in STYLES}
    faults = [
        Culprit("not applied", pattern, f"{style} cuts by experts, which the executor cannot apply yet")
        for pattern, style in named.items()
        if style in EXPERT_PARALLEL
    ]
    rules = Rules(known)
    builder = PlanBuilder(model, rules, tp)
    made = builder.build()
    idle = [
        *rules.idle,
        *(pattern for pattern in literal if not any(fits(pattern, name) for name, _ in model.named_modules())),
    ]
    if len(idle) == len(known) + len(literal) and not faults:
        names = [name for name, _ in model.named_modules() if name]
        raise UnknownModule(
            f"none of the {len(plan)} rules of the hand plan names anything in the model",
            got=", ".join(list(plan)[:3]),
            help=near(idle[0], names) if idle else None,
        )
    notes += [f"{pattern}: names nothing in the model" for pattern in idle]
    return HandPlan(made, literal, tuple(notes), (*faults, *builder.faults))


def _unknown(named: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for pattern, style in named.items():
        if style not in STYLES and style not in EXPERT_PARALLEL:
            yield pattern, style


def fits(pattern: str, name: str) -> bool:
    """Whether a pattern of torch's, in which each step is a glob, names a module."""
    steps, parts = name.split("."), pattern.split(".")
    return len(steps) == len(parts) and all(fnmatch(step, part) for step, part in zip(steps, parts, strict=True))
