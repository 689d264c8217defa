"""Integers that remember where they came from, while a model's forward is traced.

A size in the user's code that contains a cut factor must become local. Where it is computed from attributes of modules,
setting a few of those is enough. To know which, every integer attribute is replaced by one that keeps its expression,
and every size, comparison and number made from it is noted with the value it shaped.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoshard._torch import GraphRecorder
from autoshard.nested import is_plain, with_attributes
from autoshard.rewrite.sites import Sites, Written
from autoshard.size_arguments import size_arguments

#: ``("attribute", module, name, value)``, ``("size", mark, dim, value)``, ``("number", value)`` or
#: ``("op", function, expression, ...)``.
Expression = tuple[Any, ...]

#: How far into the objects that modules hold integers are followed: ``config.text_config.heads``.
_DEPTH = 2


@dataclass(frozen=True)
class SizeUse:
    """A size given to a call: ``expression`` becomes extent ``dim`` of the value with ``mark``.

    Attributes:
        expression: where the number comes from.
        mark: of the value it shapes.
        dim: of that value; the name of an argument where it is a count that the op is told: groups of a convolution.
        value: the number, as the whole model has it.
        written: how it is written in the code of a module; None where it cannot be written otherwise.
    """

    expression: Expression
    mark: int
    dim: int | str
    value: int
    written: Written | None = None


@dataclass
class Noted:
    """What was done with tracked integers.

    Attributes:
        sizes: sizes of values.
        fixed: ``(expression, result)`` that must stay as they are: comparisons, numbers, other arguments.
    """

    sizes: list[SizeUse] = field(default_factory=list)
    fixed: list[tuple[Expression, Any]] = field(default_factory=list)


def attributes(expression: Expression) -> Iterator[tuple[str, str]]:
    """Yield the ``(module, name)`` of every attribute in an expression."""
    if expression[0] == "attribute":
        yield expression[1], expression[2]
    elif expression[0] == "op":
        for part in expression[2:]:
            yield from attributes(part)


def evaluate(
    expression: Expression, values: Mapping[tuple[str, str], int], local: Callable[[int, int, int], int]
) -> Any:
    """Compute an expression with other attribute values; ``local(mark, dim, size)`` gives a rank's extent."""
    kind = expression[0]
    if kind == "number":
        return expression[1]
    if kind == "attribute":
        return values.get((expression[1], expression[2]), expression[3])
    if kind == "size":
        return local(expression[1], expression[2], expression[3])
    return expression[1](*(evaluate(part, values, local) for part in expression[2:]))


class Tracked(int):
    """An integer with its expression; arithmetic on integers keeps it, anything else is noted."""

    expression: Expression
    noted: Noted

    def __new__(cls, value: int, expression: Expression, noted: Noted) -> Tracked:
        """Make a tracked integer."""
        made = int.__new__(cls, value)
        made.expression, made.noted = expression, noted
        return made

    def __deepcopy__(self, memo: Any) -> Tracked:
        return self

    def __copy__(self) -> Tracked:
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __hash__(self) -> int:
        return int.__hash__(self)

    def __float__(self) -> float:
        self.noted.fixed.append((self.expression, int(self)))
        return float(int(self))

    def __neg__(self) -> Tracked:
        return Tracked(-int(self), ("op", operator.neg, self.expression), self.noted)


def _expression(value: Any) -> Expression:
    return value.expression if isinstance(value, Tracked) else ("number", value)


def _arithmetic(function: Callable[[Any, Any], Any], reverse: bool) -> Callable[[Tracked, Any], Any]:
    def apply(self: Tracked, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            self.noted.fixed.append((self.expression, int(self)))
            return function(other, int(self)) if reverse else function(int(self), other)
        left, right = (other, self) if reverse else (self, other)
        result = function(int(left), int(right))
        made = ("op", function, _expression(left), _expression(right))
        if isinstance(result, int):
            return Tracked(result, made, self.noted)
        self.noted.fixed.append((made, result))
        return result

    return apply


def _comparison(function: Callable[[Any, Any], bool]) -> Callable[[Tracked, Any], Any]:
    def apply(self: Tracked, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        result = function(int(self), int(other) if isinstance(other, int) else other)
        self.noted.fixed.append((("op", function, self.expression, _expression(other)), result))
        return result

    return apply


for _name in ("add", "sub", "mul", "floordiv", "mod", "pow", "truediv"):
    setattr(Tracked, f"__{_name}__", _arithmetic(getattr(operator, _name), reverse=False))
    setattr(Tracked, f"__r{_name}__", _arithmetic(getattr(operator, _name), reverse=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Tracked, f"__{_name}__", _comparison(getattr(operator, _name)))


@dataclass
class Tracker:
    """Tracks the integers of one traced twin.

    Attributes:
        recorder: marks the graph's nodes; the trace sets it.
        names: value by mark; the trace fills it at its end.
        objects: whether integers in objects that modules hold (a config) are tracked, each module with its own copy.
        sites: finds how arguments are written, once the twin is prepared.
    """

    noted: Noted = field(default_factory=Noted)
    recorder: GraphRecorder | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    objects: bool = True
    sites: Sites | None = None

    def prepare(self, twin: nn.Module) -> None:
        """Replace every integer attribute of every module of the twin, and of the plain objects that it holds.

        Forgets what an earlier twin's forward did: marks are numbers, and those of another graph mean other values.
        """
        self.noted, self.names = Noted(), {}
        self.sites = Sites(twin)
        for fqn, module in twin.named_modules():
            for name, value in list(vars(module).items()):
                if not name.startswith("_"):
                    module.__dict__[name] = self._tracked(value, fqn, name, _DEPTH if self.objects else 0)

    def _tracked(self, value: Any, fqn: str, name: str, depth: int) -> Any:
        """Return an integer that is tracked, or a copy of what holds such; everything else as it is."""
        if type(value) is int:
            return Tracked(value, ("attribute", fqn, name, value), self.noted)
        if type(value) in (list, tuple) and value and all(type(item) is int for item in value):
            return type(value)(self._tracked(item, fqn, f"{name}.{i}", depth) for i, item in enumerate(value))
        if depth and is_plain(value):
            inner = {k: self._tracked(v, fqn, f"{name}.{k}", depth - 1) for k, v in vars(value).items() if k[:1] != "_"}
            try:
                return with_attributes(value, {k: v for k, v in inner.items() if v is not vars(value)[k]})
            except (TypeError, AttributeError, ValueError, RuntimeError):  # an object that cannot be copied
                return value
        return value

    def mode(self) -> TorchFunctionMode:
        """Return the mode to run the twin's forward in."""
        return _Mode(self)

    def sized(self, tensor: Tensor, size: Any) -> torch.Size:
        """Return the sizes of a tensor as tracked integers."""
        assert self.recorder is not None
        mark = self.recorder.mark(tensor)
        if mark is None:
            return torch.Size(size)
        return torch.Size([Tracked(n, ("size", mark, i, n), self.noted) for i, n in enumerate(size)])

    def note(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Note the tracked integers among a call's arguments."""
        taken = set()
        site = None
        for one in size_arguments(name, args, kwargs, result):
            # a number from the end of a dim stays, and is right, whatever is cut before it
            if type(one.value) not in (int, Tracked) or int(one.value) < 0:
                continue
            assert self.recorder is not None
            mark = self.recorder.mark(one.tensor)
            if mark is None:
                continue
            site = site or (self.sites.here() if self.sites is not None else None)
            written = site.written(len(args), one.path) if site is not None else None
            size = one.value
            if one.times is not None:
                size = size * self.sized(one.times[0], one.times[0].shape)[one.times[1]]
            self.noted.sizes.append(SizeUse(_expression(size), mark, one.dim, int(size), written))
            taken.add(id(one.value))
        if name == "chunk":
            self._note_chunks(args[0], kwargs.get("dim", args[2] if len(args) > 2 else 0), result)
        for leaf in _leaves((args, kwargs)):
            if isinstance(leaf, Tracked) and id(leaf) not in taken:
                self.noted.fixed.append((leaf.expression, int(leaf)))

    def _note_chunks(self, tensor: Tensor, dim: int, pieces: Sequence[Tensor]) -> None:
        """Note the sizes of all pieces but the last, which may be less: no argument says them."""
        whole = self.sized(tensor, tensor.shape)[dim]
        for piece in pieces[:-1]:
            assert self.recorder is not None
            mark = self.recorder.mark(piece)
            if mark is not None:
                size = _expression(-(-whole // len(pieces)))
                self.noted.sizes.append(SizeUse(size, mark, dim % piece.dim(), piece.shape[dim]))


class _Mode(TorchFunctionMode):
    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name == "__get__" and getattr(getattr(function, "__self__", None), "__name__", "") == "shape":
            return self.tracker.sized(args[0], function(*args))
        if name == "size":
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            sizes = self.tracker.sized(args[0], function(args[0]))
            return sizes if dim is None else sizes[dim]
        result = function(*_plain(args), **_plain(kwargs))
        self.tracker.note(name, args, kwargs, result)
        return result


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _plain(value: Any) -> Any:
    """Return arguments with ordinary integers."""
    if isinstance(value, Tracked):
        return int(value)
    if isinstance(value, torch.Size):
        return torch.Size([int(item) for item in value])
    if type(value) in (list, tuple):
        return type(value)(_plain(item) for item in value)
    if type(value) is dict:
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    return value
