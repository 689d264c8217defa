"""Follow code that asks for the values of tensors, with made-up answers, where these lead through all of it.

A loop over the experts that some token chose reads which those are, and which rows. Its ops are the same for every
expert; so a few made-up numbers show all there is to see, as long as every line runs (``covered``). The integers that
the module and its code hold are tried too, to reach both arms of a branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoshard._torch import GraphRecorder
from autoshard.covered import Coverage
from autoshard.outputs import tensors
from autoshard.rewrite.sites import users_place
from autoshard.user_code import ERRORS

_FIRST = (0, 1, 0)
_READS = 1_000
_TRIES = 24
_WHY = "how many there are depends on the values of tensors"


@dataclass(frozen=True)
class Answers:
    """What is answered to questions for values.

    Attributes:
        numbers: one after the other at each place that asks.
        counts: likewise how many rows are found by what looks for some; as many as there are numbers where empty.
        heard: what one run on values was answered, question by question, taken instead where there is any.
    """

    numbers: tuple[int, ...] = _FIRST
    counts: tuple[int, ...] = ()
    heard: tuple[Any, ...] = ()


def _nobody(place: tuple[CodeType, int] | None, answer: float) -> None:
    """Tell nobody."""


class _Run:
    """The answers of one run of a module's code."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self._times: Counter[Any] = Counter()
        self._heard = iter(answers.heard)

    def number(self, place: Any) -> Any:
        """Return the next number for an instruction."""
        return self._heard_next() if self.answers.heard else self._next(place, self.answers.numbers)

    def rows(self, place: Any) -> int:
        """Return how many of what an instruction looks for are found."""
        if self.answers.heard:
            return int(self._heard_next())
        return self._next(place, self.answers.counts or (len(self.answers.numbers),))

    def _next(self, place: Any, numbers: tuple[int, ...]) -> int:
        self._times[place] += 1
        if sum(self._times.values()) > _READS:
            raise RuntimeError("the code asks for values without end")
        return numbers[(self._times[place] - 1) % len(numbers)]

    def _heard_next(self) -> Any:
        for heard in self._heard:
            return heard
        raise RuntimeError("the code asks for more values than it did before")


class Guesses(TorchFunctionMode):
    """Answers questions for values between ``begin`` and ``end``; outside it does nothing.

    Args:
        ask: told of the place of each question, and the answer.

    Attributes:
        read: the identities of all tensors that were operands.
    """

    def __init__(self, ask: Callable[[tuple[CodeType, int] | None, float], None] = _nobody) -> None:
        super().__init__()
        self.ask = ask
        self.read: set[int] = set()
        self._runs: list[_Run] = []

    def begin(self, answers: Answers) -> None:
        """Answer with ``answers``: a module's code begins."""
        self._runs.append(_Run(answers))

    def end(self) -> None:
        """Answer as before: the code ends."""
        self._runs.pop()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer a question; run everything else, and note which instruction of the user's code made the result."""
        kwargs = kwargs or {}
        if not self._runs:
            return function(*args, **kwargs)
        self.read.update(id(t) for _, t in tensors((args, kwargs)))
        place = users_place()
        if function in _NUMBERS:
            return self.answer(args[0], place)
        if function is torch.Tensor.tolist:
            return self._list(args[0], place)
        finds = _FINDS.get(function)
        result = finds(self, *args, **kwargs) if finds is not None else NotImplemented
        if result is NotImplemented:
            result = function(*args, **kwargs)
        if place is not None:
            for _, tensor in tensors(result):
                GraphRecorder.place(tensor, f"{place[0].co_name}:{place[0].co_firstlineno}:{place[1]}")
        return result

    def answer(self, tensor: Tensor, place: Any = None) -> Any:
        """Return the number of a tensor of one element, which an instruction of the user's asks for."""
        place = place or users_place()
        number = self._runs[-1].number(place)
        number = bool(number) if tensor.dtype is torch.bool else number
        number = float(number) if tensor.dtype.is_floating_point else number
        self.ask(place, number)
        return number

    def _list(self, tensor: Tensor, place: Any) -> Any:
        if not tensor.dim():
            return self.answer(tensor, place)
        return [self._list(one, place) for one in tensor.unbind()]

    def found(self, taken: Tensor, *more: int, columns: int = 1) -> list[Tensor]:
        """Return numbers that some code found in ``taken``: as many tensors (rows, *more), int64, as columns."""
        rows = self._runs[-1].rows(users_place())
        self.ask(None, rows)
        layout = ";".join([f"int64:{','.join(map(str, (rows, *more)))}"] * columns)
        return list(torch.ops.autoshard.opaque([taken], layout, "", _WHY))


_NUMBERS = frozenset(getattr(torch.Tensor, name) for name in ("item", "__int__", "__float__", "__bool__", "__index__"))


def _nonzero(guesses: Guesses, mask: Tensor, *, as_tuple: bool = False, **_: Any) -> Any:
    if as_tuple:
        return tuple(guesses.found(mask, columns=mask.dim()))
    return guesses.found(mask, mask.dim())[0]


def _where(guesses: Guesses, mask: Tensor, *others: Any, **more: Any) -> Any:
    return NotImplemented if others or more else _nonzero(guesses, mask, as_tuple=True)


def _unique(guesses: Guesses, tensor: Tensor, *options: Any, **more: Any) -> Any:
    plain = not options and not any(value for name, value in more.items() if name != "sorted")
    return guesses.found(tensor)[0] if plain else NotImplemented


def _picked(guesses: Guesses, tensor: Tensor, index: Any) -> Any:
    """``x[mask]``: the rows that are true of a mask over the first dims; ``x[number]``: one row."""
    if not isinstance(index, Tensor) or index.dtype.is_floating_point:
        return NotImplemented
    if index.dtype is torch.bool:
        return tensor[tuple(guesses.found(index, columns=index.dim()))] if index.dim() else NotImplemented
    return NotImplemented if index.dim() else tensor[guesses.answer(index)]


def _repeated(guesses: Guesses, tensor: Tensor, repeats: Any = None, dim: int | None = None, **more: Any) -> Any:
    """``x`` with each row as often as a vector says; the numbers of the rows where that is all that is given."""
    if more.get("output_size") is not None or not isinstance(repeats, (Tensor, type(None))):
        return NotImplemented
    rows = guesses.found(tensor if repeats is None else repeats)[0]
    if repeats is None:
        return rows
    return tensor.flatten().index_select(0, rows) if dim is None else tensor.index_select(dim, rows)


_FINDS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.nonzero, torch.Tensor.nonzero), _nonzero),
    torch.where: _where,
    **dict.fromkeys((torch.unique, torch.Tensor.unique), _unique),
    **dict.fromkeys((torch.repeat_interleave, torch.Tensor.repeat_interleave), _repeated),
    torch.Tensor.__getitem__: _picked,
}


def heard(function: Any, args: Any, kwargs: Any, result: Any) -> list[Any]:
    """Return what a function of torch answered to questions for values, as ``Answers`` keep it.

    Args:
        function: as a torch function mode is given it.
        args: its positional arguments.
        kwargs: the others.
        result: what it returned, with values.
    """
    if function in _NUMBERS:
        return [result]
    if function is torch.Tensor.tolist:
        return _flat(result)
    found = next((tensor for _, tensor in tensors(result)), None)
    if function not in _FINDS or found is None:
        return []
    if function is torch.Tensor.__getitem__:
        index = args[1]
        if not isinstance(index, Tensor) or index.dtype.is_floating_point:
            return []
        if index.dtype is torch.bool:
            return [found.shape[0]] if index.dim() else []
        return [] if index.dim() else [int(index)]
    if _FINDS[function] is _repeated:
        given = dict(zip(("tensor", "repeats", "dim"), args, strict=False)) | kwargs
        if given.get("output_size") is not None or not isinstance(given.get("repeats"), (Tensor, type(None))):
            return []
        return [found.shape[given.get("dim") or 0]]
    # torch.where with more than a mask looks for nothing
    return [found.shape[0]] if len(args) == 1 else []


def _flat(value: Any) -> list[Any]:
    return [one for item in value for one in _flat(item)] if isinstance(value, list) else [value]


def _with_number(answers: Answers, number: int) -> Answers:
    """Return the answers with one number more, for both arms of a branch on it."""
    return answers if number in answers.numbers else replace(answers, numbers=(*answers.numbers, number))


def _with_count(answers: Answers, count: int) -> Answers:
    """Return the answers with one count of rows more, for both arms of a branch on that."""
    counts = answers.counts or (len(answers.numbers),)
    return answers if count in counts else replace(answers, counts=(*counts, count))


def explore(module: nn.Module, args: Any, kwargs: Any, known: tuple[Any, ...] = ()) -> Answers | None:
    """Return answers that lead through all of a module's code, and past every parameter in it; None if none do.

    Args:
        module: of a twin; its forward runs on fake tensors.
        args: what it is called with.
        kwargs: likewise, by name.
        known: what a run on values was answered.
    """
    answers = Answers()
    best = _Tried(module, answers, args, kwargs)
    near = sorted({n + d for n in best.held for d in (-1, 0, 1) if n + d > 0})
    for grown in (_with_number, _with_count):
        for number in near[:_TRIES]:
            longer = grown(answers, number)
            if best.all or longer == answers:
                continue
            tried = _Tried(module, longer, args, kwargs)
            if tried.instructions > best.instructions:
                answers, best = longer, tried
    if best.all:
        return answers
    answers = Answers(heard=known)
    return answers if known and _Tried(module, answers, args, kwargs).all else None


class _Tried:
    """One run of a module's own code with made-up answers.

    Attributes:
        instructions: how many different ones ran; none where the code does not run to its end.
        all: whether all that matter ran, and every parameter was read.
        held: the integers that the module and its code hold: what an answer may be compared with.
    """

    def __init__(self, module: nn.Module, answers: Answers, args: Any, kwargs: Any) -> None:
        self.instructions, self.all, self.held = 0, False, set[int]()
        coverage = Coverage()
        guesses = Guesses(coverage.ask)
        guesses.begin(answers)
        forward = module.forward
        try:
            with guesses, coverage:
                forward(*args, **kwargs)
        except ERRORS:
            return
        self.instructions = sum(map(len, coverage.ran.values()))
        self.all = all(id(p) in guesses.read for p in module.parameters()) and not coverage.missed()
        held = [*vars(module).values(), *(const for code in coverage.ran for const in code.co_consts)]
        self.held = {value for value in held if type(value) is int}
