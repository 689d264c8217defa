"""From a forward that failed to the guesses that are worth trying next."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from autoshard.inputs.grant import at_rank, grants, with_sides
from autoshard.inputs.guess import SEQUENCE, Dim, Facts, Guess
from autoshard.inputs.probe import Failure

_SIDES = (32, 64, 224, 28, 16, 8, 128, 14, 56, 112, 256, 96, 192, 384)
_MOST_ELEMENTS = 1 << 22
_LONGEST = 4096
_UNPACK = re.compile(r"values to unpack \(expected (\d+)")
_RANGE = re.compile(r"Dimension out of range \(expected to be in range of \[-(\d+), \d+\], but got (-?\d+)\)")
_SMALL = re.compile(
    r"kernel size|too small|too short|smaller than|greater than|at least|negative|larger", re.IGNORECASE
)
_NUMBER = re.compile(
    r"converted to an index|interpreted as an integer|must be real number|to Scalar|one element tensor"
)
# conventional names: the mask, and the ids that it masks
MASKS = {"attention_mask": "input_ids", "decoder_attention_mask": "decoder_input_ids"}
# given, the forward also computes a loss: a last resort
LABELS = "labels"


@dataclass(frozen=True)
class Candidate:
    """Guesses for some of a forward's arguments.

    Attributes:
        guesses: by argument path, in the order of the signature; ``batch.x`` is a key of a dict.
        sequence: size of the sequence dims.
        declined: conventional masks that the forward did not take.
        cost: how far-fetched the way here was; the search tries the cheapest first.
    """

    guesses: Mapping[str, Guess]
    sequence: int
    declined: frozenset[str] = frozenset()
    cost: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{path}={guess}" for path, guess in self.guesses.items()) or "no arguments"

    @property
    def too_large(self) -> bool:
        """Whether a real forward on it could cost much."""
        return self.sequence > _LONGEST or any(guess.numel > _MOST_ELEMENTS for guess in self.guesses.values())

    def key(self) -> str:
        """Return a text that equal calls share."""
        return repr([(path, str(guess), guess.dims, guess.bound) for path, guess in self.guesses.items()])

    def replaced(self, path: str, guess: Guess, cost: int = 0) -> Candidate:
        """Return this candidate with one argument's guess put in or changed."""
        return dataclasses.replace(self, guesses={**self.guesses, path: guess}, cost=self.cost + cost)

    def without(self, path: str, cost: int = 0) -> Candidate:
        """Return this candidate without one argument."""
        kept = {name: guess for name, guess in self.guesses.items() if name != path}
        return dataclasses.replace(self, guesses=kept, declined=self.declined | {path}, cost=self.cost + cost)

    def with_sequence(self, size: int, cost: int = 0) -> Candidate:
        """Return this candidate with another length for every sequence dim."""
        guesses = {
            path: dataclasses.replace(
                guess, dims=tuple(Dim(SEQUENCE, size) if dim.kind == SEQUENCE else dim for dim in guess.dims)
            )
            for path, guess in self.guesses.items()
        }
        return dataclasses.replace(self, guesses=guesses, sequence=size, cost=self.cost + cost)

    def completed(self, facts: Facts) -> Candidate:
        """Return this candidate with masks of ones beside ids, in the signature's order."""
        guesses = dict(self.guesses)
        names = [parameter.name for parameter in facts.parameters]
        for mask, ids in MASKS.items():
            beside = guesses.get(ids) if ids in names or mask != "attention_mask" else _first_ids(guesses)
            if mask in names and mask not in self.declined and beside is not None and beside.kind == "ids":
                guesses.setdefault(mask, Guess("ones", beside.dims, torch.int64))
        order = sorted(guesses, key=lambda path: names.index(path.split(".")[0]))
        return dataclasses.replace(self, guesses={path: guesses[path] for path in order})


def _first_ids(guesses: Mapping[str, Guess]) -> Guess | None:
    first = [guess for path, guess in guesses.items() if not path.startswith("decoder")]
    return next((guess for guess in first if guess.kind == "ids" and len(guess.dims) == 2), None)


def refine(candidate: Candidate, failure: Failure, facts: Facts) -> Iterator[Candidate]:
    """Yield what to try after ``failure``: first what it says, then what often helps."""
    facts = dataclasses.replace(facts, sequence=candidate.sequence)
    yield from _keyed(candidate, failure, facts)
    yield from _unpacked(candidate, failure, facts)
    granted = list(_granted(candidate, failure, facts))
    yield from granted
    # what an argument became is wanted to be two things: it stands in for one that was not given
    conflict = bool(failure.wishes) and all(found.cost >= candidate.cost + 2 for found in granted)
    yield from _added(candidate, failure, facts)
    yield from _ranked(candidate, failure, facts)
    yield from _numbered(candidate, failure)
    yield from _enlarged(candidate, failure)
    yield from _plain(candidate, failure)
    yield from _model_wide(candidate, failure, facts)
    yield from _other_forms(candidate, failure, facts)
    yield from _optional(candidate, failure, facts, 1 if conflict else 2)


def polished(candidate: Candidate, patches: Mapping[str, int]) -> Candidate | None:
    """Return what passes more comfortably than ``candidate``, or None where that is itself.

    Signals that were only just long enough get eight times as long, so that nothing made from them has a size of 1;
    the sides of images shrink to whole patches.
    """
    guesses = {
        path: dataclasses.replace(guess, dims=tuple(_comfortable(dim, patches.get(path, 1)) for dim in guess.dims))
        for path, guess in candidate.guesses.items()
    }
    better = dataclasses.replace(candidate, guesses=guesses)
    return better if guesses != candidate.guesses and not better.too_large else None


def _comfortable(dim: Dim, patch: int) -> Dim:
    if dim.kind == "length" and not dim.fixed:
        return dataclasses.replace(dim, size=8 * dim.size)
    if dim.kind == "side" and dim.size > patch:
        return dataclasses.replace(dim, size=dim.size - dim.size % patch)
    return dim


def _keyed(candidate: Candidate, failure: Failure, facts: Facts) -> Iterator[Candidate]:
    """An argument that is indexed with a string is a dict."""
    if failure.key is not None:
        path, key = failure.key
        guess = facts.first_guess(inspect.Parameter(_identifier(key), inspect.Parameter.KEYWORD_ONLY))
        kept = {name: other for name, other in candidate.guesses.items() if name != path}
        yield dataclasses.replace(candidate, guesses={**kept, f"{path}.{key}": guess})
    dicts = dict.fromkeys(path.rsplit(".", 1)[0] for path in candidate.guesses if "." in path)
    key = failure.message.strip("'\"")
    if failure.kind == "KeyError" and key.isidentifier():
        guess = facts.first_guess(inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY))
        for path in dicts:
            yield candidate.replaced(f"{path}.{key}", guess)


def _unpacked(candidate: Candidate, failure: Failure, facts: Facts) -> Iterator[Candidate]:
    """An argument that is unpacked before something fails is a tuple."""
    unpack = _UNPACK.search(failure.message)
    for path in failure.iterated:
        if "." not in path and path in candidate.guesses:
            parts = {f"{path}.{index}": facts.floats(3) for index in range(int(unpack[1]) if unpack else facts.batch)}
            kept = {name: guess for name, guess in candidate.guesses.items() if name != path}
            yield dataclasses.replace(candidate, guesses={**kept, **parts})


def _identifier(key: str) -> str:
    return key if key.isidentifier() else "value"


def _granted(candidate: Candidate, failure: Failure, facts: Facts) -> Iterator[Candidate]:
    for wish in failure.wishes:
        for grant in grants(wish, candidate.guesses[wish.path], facts):
            if grant.sequence is not None:
                yield candidate.with_sequence(grant.sequence, grant.cost)
            else:
                yield candidate.replaced(wish.path, grant.guess, grant.cost)


def _added(candidate: Candidate, failure: Failure, facts: Facts) -> Iterator[Candidate]:
    """An argument that the failure speaks of was missed."""
    for index, name in enumerate(failure.missing):
        cost = 3 if name == LABELS else min(index, 1)
        yield candidate.replaced(name, facts.first_guess(_parameter(name, facts)), cost)


def _ranked(candidate: Candidate, failure: Failure, facts: Facts) -> Iterator[Candidate]:
    """The number of dims was wrong: shapes that do not unpack, dims that are not there."""
    path, seen = failure.last_shape or ("", 0)
    delta = 0
    unpack, out = _UNPACK.search(failure.message), _RANGE.search(failure.message)
    if unpack:
        delta = int(unpack[1]) - seen
    elif out:
        path = failure.touched[0] if failure.touched else path
        asked = int(out[2])
        delta = (asked + 1 if asked >= 0 else -asked) - int(out[1])
    elif "tuple index out of range" in failure.message:
        delta = 1
    elif "too many indices" in failure.message:
        path, delta = failure.touched[0] if failure.touched else path, 1
    if path in candidate.guesses and delta:
        guess = candidate.guesses[path]
        if guess.kind != "value" and len(guess.dims) + delta >= 0:
            yield candidate.replaced(path, at_rank(guess, len(guess.dims) + delta, facts))


def _numbered(candidate: Candidate, failure: Failure) -> Iterator[Candidate]:
    """The message has a size that was met, and next to it the one that was expected."""
    numbers = list(dict.fromkeys(int(text) for text in re.findall(r"(?<![\w.])\d+(?![\w])", failure.message)))[:8]
    if failure.wishes:  # its numbers are the wishes'
        return
    for path, guess in candidate.guesses.items():
        for place, dim in enumerate(() if path in MASKS else guess.dims):
            if dim.size not in numbers or dim.kind == "batch":
                continue
            for number in numbers:
                if number == dim.size or not 1 <= number <= 1 << 16:
                    continue
                late = 2 if dim.fixed else int(number == 1)
                if dim.kind == "side":
                    yield candidate.replaced(path, with_sides(guess, number), late)
                elif dim.kind == SEQUENCE:
                    if number > guess.dims[0].size:
                        yield candidate.with_sequence(number, late)
                    yield candidate.replaced(path, guess.with_dim(place, Dim("length", number, True)), late + 1)
                else:
                    yield candidate.replaced(path, guess.with_dim(place, Dim(dim.kind, number, True)), late)


def _enlarged(candidate: Candidate, failure: Failure) -> Iterator[Candidate]:
    """Images and signals may be too small, or of a size that the model was not built for."""
    told = _SMALL.search(failure.message) is not None
    for path, guess in candidate.guesses.items():
        if failure.touched and path not in failure.touched:
            continue
        if any(dim.kind == "side" for dim in guess.dims):
            first = next(dim.size for dim in guess.dims if dim.kind == "side")
            sides = [side for side in _SIDES if not told or side > first]
            for side in [2 * first, *sides] if told else sides:
                yield candidate.replaced(path, with_sides(guess, side), 1 if told else 2)
            continue
        places = [place for place, dim in enumerate(guess.dims) if dim.kind in ("length", "width") and not dim.fixed]
        places = places or [place for place, dim in enumerate(guess.dims) if dim.kind == SEQUENCE]
        if places and guess.kind == "float":
            size = 4 * guess.dims[places[-1]].size
            larger = guess.with_dim(places[-1], Dim("length", size))
            yield candidate.replaced(path, larger, 0 if told else 2)


def _plain(candidate: Candidate, failure: Failure) -> Iterator[Candidate]:
    """An argument that is used as a number is one."""
    if _NUMBER.search(failure.message):
        for path, guess in candidate.guesses.items():
            if guess.kind != "value" and not any(dim.fixed for dim in guess.dims):
                yield candidate.replaced(path, Guess("value", value=1), 1)


def _model_wide(candidate: Candidate, failure: Failure, facts: Facts) -> Iterator[Candidate]:
    """Features are as wide as most of the model, where its code compares before an operator does."""
    if failure.wishes:
        return
    for width in facts.widths:
        guesses = {
            path: dataclasses.replace(
                guess,
                dims=tuple(
                    dataclasses.replace(dim, size=width) if dim.kind == "width" and not dim.fixed else dim
                    for dim in guess.dims
                ),
            )
            for path, guess in candidate.guesses.items()
        }
        yield dataclasses.replace(candidate, guesses=guesses, cost=candidate.cost + 2)


def _other_forms(candidate: Candidate, failure: Failure, facts: Facts) -> Iterator[Candidate]:
    """Another kind of argument altogether, for those that the failure touched or else for all."""
    last = (failure.last_shape[0],) if failure.last_shape else ()
    for path in failure.touched or last or tuple(candidate.guesses):
        now = candidate.guesses.get(path)
        for other in facts.alternatives():
            if now is None or (other.kind, len(other.dims)) != (now.kind, len(now.dims)):
                yield candidate.replaced(path, other, 3)


def _optional(candidate: Candidate, failure: Failure, facts: Facts, cost: int) -> Iterator[Candidate]:
    """Leave out what need not be given, give what need not be left out."""
    for parameter in facts.parameters:
        if parameter.default is inspect.Parameter.empty:
            continue
        if parameter.name in candidate.guesses:
            yield candidate.without(parameter.name, 1 if parameter.name in failure.touched else 2)
        elif parameter.default is None and parameter.name not in candidate.declined:
            late = 3 if parameter.name == LABELS else cost
            yield candidate.replaced(parameter.name, facts.first_guess(parameter), late)


def _parameter(name: str, facts: Facts) -> inspect.Parameter:
    return next(parameter for parameter in facts.parameters if parameter.name == name)
