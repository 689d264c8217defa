"""What is refused, or warned about, before an optimizer is moved to a sharded model.

Everything here would otherwise be lost without an error, or fail inside a kernel in the middle of a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor, optim

from autoshard._torch import num_parameter_hooks
from autoshard.errors import OptimizerError
from autoshard.words import counted, fold_names

# optimizers whose arithmetic DTensor cannot do, each with what to use instead
_NO_SHARDING: tuple[tuple[type[optim.Optimizer], str], ...] = (
    (optim.Adafactor, "use torch.optim.AdamW: its state is cut over the ranks with the parameters"),
    (optim.Rprop, "use torch.optim.RMSprop or torch.optim.AdamW"),
)
_NO_FUSED: tuple[type[optim.Optimizer], ...] = (optim.SGD, optim.Adagrad)


def check_optimizer(optimizer: optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse an optimizer that cannot follow its parameters.

    Args:
        optimizer: the optimizer.
        names: name of each parameter of the model, by ``id``.

    Raises:
        OptimizerError: it has no sharded form, or holds state that cannot be cut.
    """
    if not any(id(parameter) in names for group in optimizer.param_groups for parameter in group["params"]):
        return
    kind = type(optimizer).__name__
    for refused, instead in _NO_SHARDING:
        if isinstance(optimizer, refused):
            raise OptimizerError(f"{kind} does not work on sharded parameters", help=instead)
    if isinstance(optimizer, _NO_FUSED) and any(group.get("fused") for group in optimizer.param_groups):
        raise OptimizerError(
            f"{kind} with fused=True does not work on sharded parameters",
            help=f"make it with {kind}(..., foreach=True), or leave both out",
        )
    if isinstance(optimizer, optim.LBFGS) and optimizer.state:
        raise OptimizerError(
            "LBFGS has taken a step before sharding: its history is one flat vector of all parameters",
            got=f"state of {counted(len(optimizer.state), 'parameter')}; allowed: none",
            help="parallelize the model before the first step of LBFGS",
        )
    _check_state(optimizer, names)


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
