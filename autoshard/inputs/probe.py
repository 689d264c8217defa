"""Run one forward on guessed arguments and see what becomes of each of them.

A function mode marks every tensor that was made from an argument. Where an operator wants something else than what an
argument became, or where it fails, the run stops and says which operator asked what of which argument.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard._torch import FakeMode, quiet_fake_tensors
from autoshard.inputs.invent import ValueInventor
from autoshard.inputs.missing import missing_arguments
from autoshard.inputs.wants import Want, broadcast_wants, is_consumer, joined_wants, reshape_wants, wants
from autoshard.outputs import tensors
from autoshard.user_code import ERRORS

# the kind of a failure that this module raised itself, because a want was not met
UNMET = "Unmet"


@dataclass(frozen=True)
class Wish:
    """A want, traced back to the argument whose tensor it concerns."""

    path: str
    want: Want
    shape: tuple[int, ...]
    direct: bool


@dataclass(frozen=True)
class Failure:
    """Why a forward did not pass.

    Attributes:
        kind: the exception's class, such as ``ValueError``.
        message: its text.
        wishes: what the failing operator wanted of the arguments.
        touched: the arguments that the failing operator was given something of.
        last_shape: the argument whose shape was read last, and the rank that was seen.
        missing: arguments that were not given and that the failure speaks of, likeliest first.
        iterated: the arguments that were iterated over as a whole: they may be tuples.
        key: the string key that a tensor was indexed with, and the argument it came from.
    """

    kind: str
    message: str
    wishes: tuple[Wish, ...] = ()
    touched: tuple[str, ...] = ()
    last_shape: tuple[str, int] | None = None
    missing: tuple[str, ...] = ()
    iterated: tuple[str, ...] = ()
    key: tuple[str, str] | None = None

    def __str__(self) -> str:
        first = self.message.strip().splitlines()[0] if self.message.strip() else ""
        return f"{self.kind}: {first}"[:160]


@dataclass(frozen=True)
class Outcome:
    """What one forward showed.

    Attributes:
        failure: None where the forward passed.
        progress: distinct parameters used, then operators run, before it ended.
        bounds: by argument, the number of rows of the smallest table that it indexes.
        patches: by argument, the side of the patches that an image is cut into.
        consumers: by argument, the first operator that gave it a meaning.
        invented: operators whose result depends on values that fake tensors do not have.
    """

    failure: Failure | None
    progress: tuple[int, int]
    bounds: Mapping[str, int] = field(default_factory=dict)
    patches: Mapping[str, int] = field(default_factory=dict)
    consumers: Mapping[str, str] = field(default_factory=dict)
    invented: tuple[str, ...] = ()


class _Unmet(ValueError):
    """An operator was about to take an argument that is not what it wants."""


@dataclass(frozen=True)
class _Mark:
    path: str
    direct: bool


@dataclass(frozen=True)
class _Stop:
    error: BaseException
    wishes: tuple[Wish, ...]
    touched: tuple[str, ...]
    key: tuple[str, str] | None


class _Watch(TorchFunctionMode):
    """Follows the arguments through the forward."""

    def __init__(self, arguments: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.arguments = arguments
        self.marks: Any = WeakTensorKeyDictionary()
        self.ranges: Any = WeakTensorKeyDictionary()
        self.parameters: set[int] = set()
        self.count = 0
        self.stop: _Stop | None = None
        self.last_shape: tuple[str, int] | None = None
        self.bounds: dict[str, int] = {}
        self.patches: dict[str, int] = {}
        self.consumers: dict[str, str] = {}
        self.iterated: dict[str, None] = {}
        for path, tensor in arguments.items():
            self.marks[tensor] = (_Mark(path, True),)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.count += 1
        name = getattr(func, "__name__", "")
        given = [tensor for _, tensor in tensors((args, kwargs))]
        self.parameters.update(id(tensor) for tensor in given if isinstance(tensor, nn.Parameter))
        marks = tuple(dict.fromkeys(mark for tensor in given for mark in self.marks.get(tensor, ())))
        if marks:
            self._look(name, func, args, kwargs)
        self._check_table(name, args)
        try:
            result = func(*args, **kwargs)
        except ERRORS as error:
            if self.stop is None or self.stop.error is not error:
                self._stop(error, name, args, given, wants(name, args, kwargs))
            raise
        self._spread(name, marks, args, result)
        return result

    def _look(self, name: str, func: Any, args: Any, kwargs: Any) -> None:
        """Note what this call says about the arguments; stop the run where one is not what the operator wants."""
        if name == "unbind" and args[1:] == (0,):  # how a tensor is iterated over
            self.iterated.update({path: None for path, tensor in self.arguments.items() if tensor is args[0]})
        if name == "size" or (name == "__get__" and getattr(func.__self__, "__name__", "") == "shape"):
            mark = self.marks.get(args[0], (None,))[0]
            if mark is not None:
                self.last_shape = (mark.path, args[0].ndim)
        found = wants(name, args, kwargs)
        for want in found:
            for mark in self.marks.get(want.tensor, ()):
                if is_consumer(name) and mark.direct:
                    self.consumers.setdefault(mark.path, want.op)
                if want.multiple > 1 and mark.direct:
                    self.patches.setdefault(mark.path, want.multiple)
                if want.bound is not None and mark.direct:
                    self.bounds[mark.path] = min(want.bound, self.bounds.get(mark.path, want.bound))
        unmet = [want for want in found if want.unmet() and self._concerns_argument(want)]
        if unmet:
            error = _Unmet(f"{unmet[0].op} wants {_describe(unmet[0])}, not {_shape_text(unmet[0].tensor)}")
            self._stop(error, name, args, [], unmet)
            raise error

    def _concerns_argument(self, want: Want) -> bool:
        """Whether the operand is an argument up to its layout, so that another argument would change it."""
        marks = [mark for mark in self.marks.get(want.tensor, ()) if mark.direct]
        if len(marks) != 1:
            return False
        same_dtype = want.tensor.dtype == self.arguments[marks[0].path].dtype
        sizes_only = Want(want.tensor, want.op, rank=want.rank, sizes=want.sizes)
        return same_dtype or sizes_only.unmet()

    def _check_table(self, name: str, args: Any) -> None:
        """Stop where positions counted from zero leave a table: fake tensors have no values to find that out."""
        if name != "embedding" or len(args) < 2 or not isinstance(args[0], Tensor):
            return
        end, rows = self.ranges.get(args[0], 0), args[1].shape[0]
        if end > rows:
            error = _Unmet(f"positions up to {end} do not fit a table of {rows} rows")
            want = Want(args[0], "embedding", sizes={-1: rows}, exact=False)
            wishes = [Wish(path, want, tuple(args[0].shape), False) for path in self.arguments]
            self.stop = _Stop(error, tuple(wishes), (), None)
            raise error

    def _stop(self, error: BaseException, name: str, args: Any, given: list[Tensor], found: list[Want]) -> None:
        """Keep what the failing call wanted; what torch itself checks is read from the operands' shapes."""
        out_of_table = isinstance(error, IndexError)
        found = [want for want in found if want.unmet() or (out_of_table and want.bound is not None)]
        found = found or reshape_wants(name, args) or joined_wants(name, args)
        if not found and len(given) < 8:
            found = broadcast_wants(name, given)
        wishes = [
            Wish(mark.path, want, tuple(want.tensor.shape), mark.direct)
            for want in found
            for mark in self.marks.get(want.tensor, ())
        ]
        touched = dict.fromkeys(mark.path for tensor in given for mark in self.marks.get(tensor, ()))
        key = None
        if name == "__getitem__" and isinstance(args[1], str):
            key = next(((mark.path, args[1]) for mark in self.marks.get(args[0], ())), None)
        self.stop = _Stop(error, tuple(wishes), tuple(touched), key)

    def _spread(self, name: str, marks: tuple[_Mark, ...], args: Any, result: Any) -> None:
        """Mark what came out."""
        if name == "arange" and isinstance(result, Tensor) and (len(args) == 1 or args[:1] == (0,)):
            self.ranges[result] = result.shape[0]
        elif name in ("unsqueeze", "expand", "view", "to", "__getitem__") and args and isinstance(args[0], Tensor):
            end = self.ranges.get(args[0], 0)
            if end and isinstance(result, Tensor) and result.shape[-1] == end:
                self.ranges[result] = end
        if not marks:
            return
        kept = tuple(_Mark(mark.path, False) for mark in marks) if is_consumer(name) else marks
        for _, tensor in tensors(result):
            before = self.marks.get(tensor, ())
            self.marks[tensor] = before or tuple(dict.fromkeys(kept))


def probe(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], arguments: Mapping[str, Any], mode: FakeMode
) -> Outcome:
    """Run ``model(*args, **kwargs)`` once, without gradients, and say how it went.

    Where it fails after it read a number that fake tensors do not have, it is run once more with another number.

    Args:
        model: whose forward is run; its buffers and the CPU generator are restored afterwards.
        args: positional arguments.
        kwargs: keyword arguments.
        arguments: every guessed argument by its path; None for a parameter of the forward that is not given.
        mode: the fake-tensor mode of the model's parameters, or None for a real model.
    """
    first = _run(model, args, kwargs, arguments, mode, 1)
    if first.failure is None or not first.invented:
        return first
    second = _run(model, args, kwargs, arguments, mode, 0)
    return second if second.failure is None or second.progress > first.progress else first


def _run(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    arguments: Mapping[str, Any],
    mode: FakeMode,
    number: int,
) -> Outcome:
    watch = _Watch({path: value for path, value in arguments.items() if isinstance(value, Tensor)})
    inventor = ValueInventor(number)
    failure = None
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(_restored(model))
            stack.enter_context(torch.no_grad())
            if mode is not None:
                stack.enter_context(quiet_fake_tensors())
                stack.enter_context(mode)
                stack.enter_context(inventor)
            stack.enter_context(watch)
            model(*args, **kwargs)
    except ERRORS as error:
        failure = _failure(error, watch, arguments)
    progress = (len(watch.parameters), watch.count)
    return Outcome(failure, progress, watch.bounds, watch.patches, watch.consumers, inventor.invented())


@contextlib.contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Undo what a forward does to real buffers (running statistics) and to the CPU random generator."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.device.type != "meta"]
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in kept:
                    buffer.copy_(value)


def _failure(error: BaseException, watch: _Watch, arguments: Mapping[str, Any]) -> Failure:
    stop = watch.stop if watch.stop is not None and watch.stop.error is error else None
    absent = [path for path, value in arguments.items() if value is None]
    return Failure(
        kind=UNMET if isinstance(error, _Unmet) else type(error).__name__,
        message=str(error),
        wishes=stop.wishes if stop else (),
        touched=stop.touched if stop else (),
        last_shape=watch.last_shape,
        missing=tuple(missing_arguments(error, absent)),
        iterated=tuple(watch.iterated),
        key=stop.key if stop else None,
    )


def _describe(want: Want) -> str:
    parts = [] if want.kind is None else [{"ids": "integers"}.get(want.kind, f"{want.kind}s")]
    if want.dtype is not None:
        parts.append(str(want.dtype).removeprefix("torch."))
    if want.rank is not None:
        parts.append(f"{want.rank} dims")
    parts += [f"{size} in dim {dim}" for dim, size in want.sizes.items()]
    return ", ".join(parts)


def _shape_text(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
