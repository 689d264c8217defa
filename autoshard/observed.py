"""One eager run of a model's forward, and what each module call was given, returned and read in it.

Where tracing cannot follow a module's code, this says what goes in and out of it, and of each module it calls. Where
the parameters have values the run is real; where they do not, values are made up as they are asked for.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from autoshard import replace as rewritten
from autoshard._torch import fake_mode_of, quiet_fake_tensors
from autoshard.guesses import heard
from autoshard.inputs import ExampleInputs, materialise
from autoshard.inputs.invent import ValueInventor
from autoshard.outputs import states, tensors
from autoshard.quiet import quiet
from autoshard.templates import Snapshot
from autoshard.twin import Twin, make_twin
from autoshard.user_code import ERRORS

#: What a tensor says of itself that is the same of a rank's share.
_KEPT = frozenset(
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "requires_grad", "is_cuda", "layout", "ndim", "is_meta", "is_leaf", "is_sparse")
) | {Tensor.dim, Tensor.ndimension, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size}


@dataclass
class Seen:
    """One call of one module.

    Attributes:
        fqn: the module's first name.
        parent: number of the call that made it, or None.
        arguments: template of ``(args, kwargs)``.
        outputs: template of the answer.
        reads: first names of the parameters that the module's own code read.
        follows: number of the call that made one of its arguments, directly.
        heard: what its code and that of modules in it was answered where it asked for values of tensors.
    """

    fqn: str
    parent: int | None
    arguments: Any
    outputs: Any = None
    reads: set[str] = field(default_factory=set)
    follows: set[int] = field(default_factory=set)
    heard: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Observed:
    """Every module call of one run, in order of entry; ``real`` says whether the values were."""

    calls: tuple[Seen, ...]
    real: bool

    def of(self, fqn: str) -> list[int]:
        """Return the numbers of a module's calls."""
        return [number for number, call in enumerate(self.calls) if call.fqn == fqn]


def observe(model: nn.Module, inputs: ExampleInputs) -> Observed | None:
    """Run ``model``'s forward on ``inputs`` without changing the model; None where it does not run."""
    everything = [*model.parameters(), *model.buffers()]
    if all(t.device.type != "meta" for t in everything) and fake_mode_of(everything) is None:
        found = _real(model, inputs)
        if found is not None:
            return found
    for number in (1, 0):
        found = _invented(model, inputs, number)
        if found is not None:
            return found
    return None


def _real(model: nn.Module, inputs: ExampleInputs) -> Observed | None:
    memo: dict[int, Any] = {id(p): p for p in model.parameters()}
    with torch.no_grad():
        memo |= {id(b): b.clone() for b in model.buffers()}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    made = _with_values(inputs)
    args, kwargs = tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, (made.args, made.kwargs))
    with torch.random.fork_rng(devices=[]):
        copied = copy.deepcopy(model, memo)
        rewritten.apply(copied, rewritten.find(copied))
        return _run(copied, args, kwargs, ExitStack(), real=True)


def _with_values(inputs: ExampleInputs) -> ExampleInputs:
    """Return the inputs with values: those that were given keep theirs."""
    made = materialise(inputs)

    def choose(old: Any, new: Any) -> Any:
        return old if isinstance(old, Tensor) and old.device.type != "meta" and fake_mode_of([old]) is None else new

    args, kwargs = tree_map(choose, (inputs.args, inputs.kwargs), (made.args, made.kwargs))
    return replace(made, args=args, kwargs=kwargs)


def _invented(model: nn.Module, inputs: ExampleInputs, number: int) -> Observed | None:
    twin = make_twin(model)
    args, kwargs = fakes((inputs.args, inputs.kwargs), twin)
    around = ExitStack()
    for context in (quiet_fake_tensors(), twin.mode, ValueInventor(number)):
        around.enter_context(context)
    return _run(twin.model, args, kwargs, around, real=False)


def fakes(value: Any, twin: Twin) -> Any:
    """Return nested arguments with fake CPU tensors of the twin's mode in place of all others."""

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or getattr(leaf, "fake_mode", None) is twin.mode:
            return leaf
        with twin.mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", requires_grad=leaf.requires_grad)

    return tree_map(fake, value)


def _run(model: nn.Module, args: Any, kwargs: Mapping[str, Any], around: ExitStack, real: bool) -> Observed | None:
    watch = _Watch(model, real)
    with around, quiet(), warnings.catch_warnings(action="ignore"), torch.no_grad(), watch.attached(), watch:
        try:
            model(*args, **kwargs)
        except ERRORS:
            return None  # whoever asked has the error of the trace, which says more
    return Observed(tuple(watch.calls), real)


class _Watch(TorchFunctionMode):
    """Follows the calls of a model's modules, and the parameters that each one's own code reads."""

    def __init__(self, model: nn.Module, real: bool) -> None:
        super().__init__()
        self.real = real
        self.names = {module: fqn for fqn, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self.parameters = {id(p): fqn for fqn, p in model.named_parameters(remove_duplicate=True)}
        self.calls: list[Seen] = []
        self.open: list[tuple[int, nn.Module, Snapshot]] = []
        self.makers: dict[int, tuple[int, Tensor]] = {}

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hook every module while inside."""
        handles = []
        for module in self.names:
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the parameters among the operands; sizes that are read of one count as well, what no cut changes not."""
        if self.open and func not in _KEPT:
            found = {self.parameters[id(t)] for _, t in tensors((args, kwargs)) if id(t) in self.parameters}
            self.calls[self.open[-1][0]].reads.update(found)
        result = func(*args, **(kwargs or {}))
        for number, _, _ in self.open if self.real else ():
            self.calls[number].heard += heard(func, args, kwargs or {}, result)
        return result

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # a parameter that is handed over counts as read by the caller: its shape is looked at here
        snapshot = Snapshot()
        parent = self.open[-1][0] if self.open else None
        seen = Seen(self.names[module], parent, snapshot.of((args, kwargs)))
        for _, tensor in tensors((args, kwargs)):
            if id(tensor) in self.makers:
                seen.follows.add(self.makers[id(tensor)][0])
        self.calls.append(seen)
        self.open.append((len(self.calls) - 1, module, snapshot))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        while self.open and self.open[-1][1] is not module:
            self.open.pop()
        number, _, snapshot = self.open.pop()
        self.calls[number].outputs = snapshot.of(result, (args, kwargs))
        for _, tensor in (*tensors(result), *states(result)):
            self.makers[id(tensor)] = (number, tensor)
