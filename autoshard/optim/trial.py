"""Try an optimizer out: two steps on small sharded parameters against the same two steps on plain ones.

All ranks of a 2 x 2 mesh are simulated in this process, so it costs no message and works beside a live process group.
The optimizer is a fresh one of the same class and settings: the user's own is only read.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from autoshard._torch import lift, local_part, quiet_redistribution, spec_of, wrap
from autoshard.executor.inparts import InParts, mark
from autoshard.executor.parts import Order
from autoshard.proving.simulate import on_each_rank, simulated
from autoshard.user_code import ERRORS

Make = Callable[[list[nn.Parameter]], Optimizer]

_STEPS = 2
_AXIS = 2  # ranks along each of the two axes
_NOT_OPTIONS = frozenset({"params", "param_names", "initial_lr"})
_SHAPES: Mapping[int, tuple[int, ...]] = {0: (), 1: (6,), 2: (6, 4)}
_ORDER = Order(1, ((0, 2), (2, 2)), _AXIS)


@dataclass(frozen=True)
class Outcome:
    """What a trial showed.

    Attributes:
        untested: why nothing can be said, or empty: the step fails on plain parameters too, for one.
        error: what the step raised on sharded parameters, or empty.
        whole: state keys with a plain tensor of the parameter's global shape.
        difference: largest difference from the plain result, relative to the largest change of a parameter.
    """

    untested: str = ""
    error: str = ""
    whole: tuple[str, ...] = ()
    difference: float = 0.0


class _ReadsMemory(Exception):
    """The step asked a tensor for its address."""


class _Guard(TorchFunctionMode):
    """Stop a kernel that reads raw memory before it does: a DTensor's address is 0, and using it ends the process."""

    _READERS = frozenset({"data_ptr", "untyped_storage", "storage"})

    def __init__(self) -> None:
        super().__init__()
        self.of_part = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse the address of a sharded tensor; note that of a local part, which has none in a simulation."""
        if getattr(func, "__name__", "") in self._READERS and args and type(args[0]) is not Tensor:
            if isinstance(args[0], DTensor):
                raise _ReadsMemory("its step reads the raw memory of a parameter, which is not all on one rank")
            self.of_part = True
        return func(*args, **(kwargs or {}))


def try_out(make: Make, dims: Sequence[int], in_parts: bool = False) -> Outcome:
    """Take two steps on plain and on sharded parameters, and compare.

    Args:
        make: returns a fresh optimizer of the parameters it is given.
        dims: how many dims each of those parameters has.
        in_parts: whether tp cuts those of two dims and more in parts.
    """
    generator = torch.Generator().manual_seed(0)
    values, *grads = ([_random(dim, generator) for dim in dims] for _ in range(1 + _STEPS))
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), quiet_redistribution(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about simulated ranks and small tensors: none of the user's business
        try:
            plain, again = (_plain(make, values, grads, seed) for seed in (1, 2))
        except ERRORS as error:
            return Outcome(untested=f"made anew and stepped on the CPU, it raises {_first_line(error)}")
        guard = _Guard()
        try:
            with simulated(_AXIS * _AXIS):
                sharded, whole = _sharded(make, values, grads, guard, in_parts)
        except (_ReadsMemory, *ERRORS) as error:
            if guard.of_part:
                return Outcome(untested="its step reads the raw memory of this rank's parts, which a trial cannot show")
            return Outcome(error=_first_line(error))
    if any(not torch.equal(one, other) for one, other in zip(plain, again, strict=True)):
        return Outcome(whole=whole)  # it rolls dice: nothing to compare
    return Outcome(whole=whole, difference=_difference(values, plain, sharded))


def fresh_like(optimizer: Optimizer) -> tuple[Make, list[int]]:
    """Return how to make an optimizer of the same class and settings, and how many dims its parameters are to have.

    There is one group for each combination of switches in ``optimizer``, and one parameter for each number of dims
    in it: lists of thousands are tried out as one.
    """
    kinds: dict[tuple[Any, ...], tuple[dict[str, Any], set[int]]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in _NOT_OPTIONS}
        switches = tuple((k, v) for k, v in sorted(options.items()) if v is None or isinstance(v, bool | str))
        kinds.setdefault(switches, (options, set()))[1].update(p.dim() for p in group["params"])
    kind, defaults = type(optimizer), _arguments(type(optimizer), getattr(optimizer, "defaults", {}))
    layout = [(options, sorted(dims)) for options, dims in kinds.values() if dims]

    def make(parameters: list[nn.Parameter]) -> Optimizer:
        left = iter(parameters)
        groups = [{**_settings(options), "params": [next(left) for _ in dims]} for options, dims in layout]
        return kind(groups, **copy.deepcopy(defaults))

    return make, [dim for _, dims in layout for dim in dims]


def _arguments(kind: type[Optimizer], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that the constructor takes: an optimizer may keep more than it was given."""
    parameters = inspect.signature(kind).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {key: value for key, value in defaults.items() if takes_all or key in parameters}


def _settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's settings, with a learning rate: a warm-up that starts at 0 would hide every difference."""
    own = copy.deepcopy(dict(options))
    return {**own, "lr": 1e-3} if isinstance(own.get("lr"), int | float) and own["lr"] == 0 else own


def _random(dim: int, generator: torch.Generator) -> Tensor:
    shape = _SHAPES[dim] if dim in _SHAPES else _SHAPES[2] + (2,) * (dim - 2)
    return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)


def _plain(make: Make, values: Sequence[Tensor], grads: Sequence[Sequence[Tensor]], seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    parameters = [nn.Parameter(value.clone()) for value in values]
    _train(make(parameters), parameters, [[grad.clone() for grad in step] for step in grads])
    return [parameter.detach() for parameter in parameters]


def _sharded(
    make: Make, values: Sequence[Tensor], grads: Sequence[Sequence[Tensor]], guard: _Guard, in_parts: bool
) -> tuple[list[list[Tensor]], tuple[str, ...]]:
    """Return each parameter whole as every rank sees it, and the keys of state that is whole."""
    mesh = init_device_mesh("cpu", (_AXIS, _AXIS), mesh_dim_names=("data", "tp"))
    parameters = [_parameter(value, mesh, in_parts) for value in values]
    cut_grads = [[_cut(grad, mesh, in_parts) for grad in step] for step in grads]
    with guard:
        optimizer = make(parameters)
        _train(optimizer, parameters, cut_grads)
    whole = {
        str(key)
        for parameter in parameters
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and _is_whole(value, parameter)
    }
    wholes = [on_each_rank(_full(parameter), _AXIS * _AXIS) for parameter in parameters]
    return wholes, tuple(sorted(whole))


def _full(parameter: Tensor) -> Tensor:
    # an optimizer may have put something else into .data
    detached = parameter.detach()
    return detached.full_tensor() if isinstance(detached, DTensor) else detached


def _is_whole(value: Tensor, parameter: Tensor) -> bool:
    return (
        isinstance(parameter, DTensor)
        and value.shape == parameter.shape
        and local_part(parameter).numel() < parameter.numel()
    )


def _parameter(value: Tensor, mesh: DeviceMesh, in_parts: bool) -> nn.Parameter:
    held = _cut(value, mesh, in_parts)
    made: Any = nn.Parameter(held)
    if isinstance(held, InParts):
        mark(made, _ORDER)
    parameter: nn.Parameter = made
    return parameter


def _cut(value: Tensor, mesh: DeviceMesh, in_parts: bool) -> DTensor:
    """Cut as fsdp and tp together do: rows over data, the second dim over tp where there is one."""
    in_parts &= value.dim() > 1
    value = _ORDER.by_rank(value) if in_parts else value
    placements: list[Placement] = [Replicate(), Replicate()]
    if value.dim():
        placements[0] = Shard(0)
    if value.dim() > 1:
        placements[1] = Shard(1)
    held = distribute_tensor(value, mesh, placements, src_data_rank=None)
    # simulated ranks share what is whole until each has its own: an update in place would count once for each
    alone = wrap(lift(local_part(held)), spec_of(held))
    return mark(alone, _ORDER) if in_parts else alone


def _train(optimizer: Optimizer, parameters: Sequence[nn.Parameter], grads: Iterable[Sequence[Tensor]]) -> None:
    step: Any = optimizer.step
    needed = [
        p for p in inspect.signature(step).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    for gradients in grads:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        step(*[_loss] * bool(needed))


def _loss() -> Tensor:
    return torch.zeros(())


def _difference(values: Sequence[Tensor], plain: Sequence[Tensor], sharded: Sequence[Sequence[Tensor]]) -> float:
    worst, change = 0.0, 0.0
    for value, want, ranks in zip(values, plain, sharded, strict=True):
        change = max(change, float((want - value).abs().max()))
        worst = max(worst, *(float((got - want).abs().max()) for got in ranks))
    return worst / change if change else float(worst > 0)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__
