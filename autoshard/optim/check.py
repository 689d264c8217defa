"""What is refused, or warned about, before an optimizer is moved to a sharded model.

Everything here would otherwise be lost without an error, or fail inside a kernel in the middle of a step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import Tensor, optim

from autoshard._torch import num_parameter_hooks
from autoshard.errors import OptimizerError
from autoshard.optim.table import REFUSED, WORKS, Support, support_of, way_of
from autoshard.optim.trial import Outcome, fresh_like, try_out
from autoshard.words import counted, fold_names

# of the largest change that two steps make to a parameter: rounding stays below the first, wrong arithmetic above the
# second; torch's Muon, which computes in bfloat16, is between
_ROUNDING = 1e-4
_WRONG = 0.2
_LISTED = "use an optimizer of torch.optim: docs/optimizers.md lists those that work"


def check_optimizer(
    optimizer: optim.Optimizer, names: Mapping[int, str], in_parts: Collection[str] = frozenset()
) -> None:
    """Refuse an optimizer that cannot follow its parameters.

    Args:
        optimizer: the optimizer.
        names: name of each parameter of the model, by ``id``.
        in_parts: names of those that tp cuts, or has cut, in parts.

    Raises:
        OptimizerError: it has no sharded form, or holds state that cannot be cut.
    """
    mine = [names[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in names]
    if not mine:
        return
    support = support_of(type(optimizer))
    if support is None:
        _check_by_trial(optimizer)
    else:
        _check_by_table(optimizer, support)
    if fused := [name for name in mine if name in in_parts]:
        _check_in_parts(optimizer, support, fused)
    if isinstance(optimizer, optim.LBFGS) and optimizer.state:
        raise OptimizerError(
            "LBFGS has taken a step before sharding: its history is one flat vector of all parameters",
            got=f"state of {counted(len(optimizer.state), 'parameter')}; allowed: none",
            help="parallelize the model before the first step of LBFGS",
        )
    _check_state(optimizer, names)


def check_factory(factory: object) -> None:
    """Refuse an optimizer class that cannot work on sharded parameters, before anything is made of it.

    Args:
        factory: what is to make an optimizer; only a class, or a partial of one, tells what it will be.

    Raises:
        OptimizerError: it is a class that no option makes work.
    """
    kind = factory.func if isinstance(factory, functools.partial) else factory
    support = support_of(kind) if isinstance(kind, type) else None
    if support is not None and WORKS not in (support.loop, support.foreach, support.fused):
        raise _refusal(support, "")


def _check_by_table(optimizer: optim.Optimizer, support: Support) -> None:
    for group in optimizer.param_groups:
        on_accelerator = any(p.device.type not in ("cpu", "meta") for p in group["params"])
        way = way_of(group.get("foreach"), group.get("fused"), on_accelerator)
        if support.verdict(way) == REFUSED:
            raise _refusal(support, "" if support.loop == REFUSED else f" with {way}=True")


def _refusal(support: Support, option: str) -> OptimizerError:
    return OptimizerError(
        f"{support.kind.__name__}{option} does not work on sharded parameters", help=f"use {support.instead}"
    )


def _check_by_trial(optimizer: optim.Optimizer) -> None:
    kind = type(optimizer).__name__
    outcome = try_out(*fresh_like(optimizer))
    if outcome.untested:
        _warn(f"{kind} could not be tried on sharded parameters ({outcome.untested}): check that it trains as before")
    elif outcome.error:
        raise OptimizerError(f"{kind} does not work on sharded parameters", got=outcome.error, help=_LISTED)
    elif outcome.whole:
        raise OptimizerError(
            f"{kind} keeps its state whole on every rank, so sharding would save none of it",
            got=f"plain tensors of the global shape: {', '.join(outcome.whole)}",
            help="make its state with zeros_like(parameter), or " + _LISTED,
        )
    elif outcome.difference > _WRONG:
        raise OptimizerError(
            f"{kind} trains something else on sharded parameters than on whole ones",
            got=f"after 2 steps of a trial a difference of {outcome.difference:.0%} of the largest change",
            help=_LISTED,
        )
    elif outcome.difference > _ROUNDING:
        _warn(
            f"{kind} gives {outcome.difference:.1%} of a step's change another result on sharded parameters "
            "than on whole ones: more than float32 rounding"
        )


def _check_in_parts(optimizer: optim.Optimizer, support: Support | None, names: Sequence[str]) -> None:
    """Refuse one that mixes rows of a matrix: a rank holds rows of each part, in another order than the whole."""
    outcome = Outcome() if support is not None else try_out(*fresh_like(optimizer), in_parts=True)
    refused = support is not None and support.in_parts == REFUSED
    if refused or outcome.error or outcome.difference > _WRONG:
        raise OptimizerError(
            f"{type(optimizer).__name__} does not work on parameters that tp cuts in parts, such as fused projections",
            at=_some(names),
            got=outcome.error or "it computes with whole matrices, or all parameters as one vector",
            help="give those to torch.optim.AdamW, or keep them whole: overrides={name: 'replicate'}",
        )


def _check_state(optimizer: optim.Optimizer, names: Mapping[int, str]) -> None:
    whole: list[str] = []
    for parameter, values in optimizer.state.items():
        name = names.get(id(parameter))
        if name is None:
            continue
        for key, value in values.items():
            if not isinstance(value, Tensor):
                continue
            if value.is_meta:
                raise OptimizerError(
                    f"{type(optimizer).__name__} holds state without values",
                    at=name,
                    got=f"{key} on the meta device",
                    help="make this optimizer after the weights are loaded, or after the model is parallelized",
                )
            if value.numel() > 1 and value.shape != parameter.shape:
                whole.append(f"{name}: {key} {tuple(value.shape)}")
    if whole:
        _warn(
            f"{type(optimizer).__name__} keeps {counted(len(whole), 'tensor')} of another shape than their parameter, "
            f"so they stay whole on every rank: check that it works on sharded parameters ({_some(whole)})"
        )


def check_parameters(names: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse hooks on parameters, and warn about gradients: the new parameters have neither.

    Args:
        names: name and parameter, each parameter once.

    Raises:
        OptimizerError: a parameter carries hooks.
    """
    hooked: list[str] = []
    with_grad: list[str] = []
    for name, parameter in names:
        if num_parameter_hooks(parameter):
            hooked.append(name)
        if parameter.grad is not None:
            with_grad.append(name)
    if hooked:
        raise OptimizerError(
            f"{counted(len(hooked), 'parameter')} with gradient hooks: sharding makes new parameters without them",
            at=_some(hooked),
            help="register the hooks after the model is parallelized, on its new parameters",
        )
    if with_grad:
        _warn(f"the gradients of {counted(len(with_grad), 'parameter')} are dropped by sharding ({_some(with_grad)})")


def warn_outside(optimizer: optim.Optimizer, shapes: Sequence[tuple[int, ...]]) -> None:
    """Warn about parameters of an optimizer that the model does not have.

    Args:
        optimizer: the optimizer.
        shapes: shapes of those parameters, in elements.
    """
    _warn(
        f"{type(optimizer).__name__} holds {counted(len(shapes), 'parameter')} that no module of the model has: "
        f"left as they are, and their gradients are not averaged over the ranks "
        f"(shapes {_some([str(tuple(shape)) for shape in shapes])})"
    )


def _some(names: Iterable[str], most: int = 3) -> str:
    folded = fold_names(names)
    rest = len(folded) - most
    return ", ".join(folded[:most]) + (f" and {rest} more" if rest > 0 else "")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
