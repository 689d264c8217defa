"""Example inputs for a model's forward: the ones that were given, or ones found by trying.

Nothing is looked up by the model's class or by the names of its parameters. A first guess comes from the forward's
signature; each forward that fails says which operator wanted what of which argument, and that makes the next guess.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from autoshard._torch import FakeMode, fake_mode_of
from autoshard.errors import InputsNotFound, InvalidArgument
from autoshard.inputs.given import given_dims, split_given
from autoshard.inputs.guess import Guess, read_facts
from autoshard.inputs.make import arrange, make_tensor, path_of, real_tensor
from autoshard.inputs.probe import Outcome, probe
from autoshard.inputs.refine import Candidate, polished, refine
from autoshard.inputs.seed import seeds

# deterministic limits, so that a plan is the same on every machine: forwards, and operators run in all of them
_MOST_TRIES = 200
_MOST_CALLS = 150_000


@dataclass(frozen=True)
class ExampleInputs:
    """Arguments of one forward.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        dims: by argument path, what each dim of a tensor stands for: ``"batch"``, ``"sequence"`` or None. A path is
            the position (``"0"``) or the keyword, and the keys inside, joined by dots. All dims with one meaning
            have one size.
        assumptions: what was assumed, one sentence each.
        tried: what was tried, one line each; the last one passed.
        bounds: by argument path, integers are below it; what is not listed is all ones or floating point.
        opaque: what an earlier trace with them kept out of the graph, so that the next one does too; None before.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dims: dict[str, tuple[str | None, ...]]
    assumptions: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    bounds: Mapping[str, int] = field(default_factory=dict)
    opaque: Any = field(default=None, compare=False, repr=False)


def example_inputs(model: nn.Module, given: Any = None, *, batch: int = 2, sequence: int = 13) -> ExampleInputs:
    """Return arguments on which ``model``'s forward runs.

    Args:
        model: its tensors may be fake: then the inputs are fake tensors of the same mode, and trying costs nothing.
        given: a tuple of arguments, a dict of keyword arguments or a pair of both: used as it is, unchecked; what an
            earlier call returned is returned again.
        batch: size of batch dims, above 1.
        sequence: size of sequence dims, above 1; best one that is no other size of the model.

    Raises:
        InputsNotFound: every guess failed.
        InvalidArgument: ``given`` is no arguments, or a size is below 2.
    """
    if isinstance(given, ExampleInputs):
        return given
    if given is not None:
        args, kwargs = split_given(given)
        return ExampleInputs(args, kwargs, given_dims(args, kwargs), ("the example inputs were given",))
    if batch < 2 or sequence < 2:
        raise InvalidArgument("a size of 1 hides a dim from the analysis", got=f"batch={batch}, sequence={sequence}")
    return _Search(model, batch, sequence).run()


def materialise(inputs: ExampleInputs, seed: int = 0) -> ExampleInputs:
    """Return the same arguments with real CPU tensors in place of fake or meta ones, drawn from ``seed``."""
    generator = torch.Generator().manual_seed(seed)

    def real(path: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return real_tensor(tuple(value.shape), value.dtype, inputs.bounds.get(path), generator)
        if isinstance(value, dict):
            return {key: real(f"{path}.{key}", item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(real(f"{path}.{index}", item) for index, item in enumerate(value))
        return value

    args = tuple(real(str(index), value) for index, value in enumerate(inputs.args))
    return replace(inputs, args=args, kwargs={name: real(name, value) for name, value in inputs.kwargs.items()})


class _Search:
    """Tries candidates, the cheapest first and among those the ones that came furthest."""

    def __init__(self, model: nn.Module, batch: int, sequence: int) -> None:
        self.model = model
        self.facts = read_facts(model, batch, sequence)
        self.mode: FakeMode = fake_mode_of([*model.parameters(), *model.buffers()])
        self.tried: list[str] = []
        self.calls = 0
        self.furthest: tuple[tuple[int, int], str] = ((-1, -1), "")
        self._serial = itertools.count()
        self._heap: list[tuple[int, tuple[int, int], int, Candidate]] = []
        self._costs: dict[str, int] = {}

    def run(self) -> ExampleInputs:
        """Return the first candidate that passes."""
        self._push(seeds(self.model, self.facts), (0, 0))
        done: set[str] = set()
        while self._heap and len(self.tried) < _MOST_TRIES and self.calls < _MOST_CALLS:
            candidate = heapq.heappop(self._heap)[-1]
            key = candidate.key()
            if key in done:
                continue
            done.add(key)
            values, outcome = self._try(candidate)
            if outcome.failure is None:
                return self._passed(*self._polished(candidate, values, outcome))
            self._push(refine(candidate, outcome.failure, self.facts), outcome.progress)
        raise self._not_found()

    def _push(self, candidates: Iterable[Candidate], progress: tuple[int, int]) -> None:
        for found in candidates:
            candidate = found.completed(self.facts)
            key = candidate.key()
            if not candidate.too_large and candidate.cost < self._costs.get(key, candidate.cost + 1):
                self._costs[key] = candidate.cost
                further = (-progress[0], -progress[1])
                heapq.heappush(self._heap, (candidate.cost, further, next(self._serial), candidate))

    def _try(self, candidate: Candidate) -> tuple[dict[str, Any], Outcome]:
        generator = torch.Generator().manual_seed(0)
        values = {
            path: make_tensor(guess, self.facts.device, self.mode, generator)
            for path, guess in candidate.guesses.items()
        }
        args, kwargs = arrange(values, self.facts)
        roots = {path.split(".")[0] for path in values}
        absent = {p.name: None for p in self.facts.parameters if p.name not in roots}
        outcome = probe(self.model, args, kwargs, {**absent, **values}, self.mode)
        self.calls += outcome.progress[1]
        self.tried.append(f"{candidate}: {outcome.failure or 'passed'}")
        self.furthest = max(self.furthest, (outcome.progress, self.tried[-1]))
        return values, outcome

    def _polished(
        self, candidate: Candidate, values: dict[str, Any], outcome: Outcome
    ) -> tuple[Candidate, dict[str, Any], Outcome]:
        better = polished(candidate, outcome.patches)
        if better is None:
            return candidate, values, outcome
        more, again = self._try(better)
        if again.failure is None:
            return better, more, again
        self.tried.append(f"{candidate}: passed")
        return candidate, values, outcome

    def _passed(self, candidate: Candidate, values: dict[str, Any], outcome: Outcome) -> ExampleInputs:
        args, kwargs = arrange(values, self.facts)
        names = list(candidate.guesses)
        paths = {path: path_of(path, names, self.facts) for path in names}
        tensors = {path: guess for path, guess in candidate.guesses.items() if guess.kind != "value"}
        bounds = {
            paths[path]: outcome.bounds.get(path, guess.bound) for path, guess in tensors.items() if guess.kind == "ids"
        }
        return ExampleInputs(
            args,
            kwargs,
            {paths[path]: tuple(dim.role for dim in guess.dims) for path, guess in tensors.items()},
            tuple(self._assumptions(candidate, outcome)),
            tuple(self.tried),
            bounds,
        )

    def _assumptions(self, candidate: Candidate, outcome: Outcome) -> Iterator[str]:
        for path, guess in candidate.guesses.items():
            yield f"{path} is {_described(guess, outcome.consumers.get(path))}"
        absent = [
            p.name for p in self.facts.parameters if p.name not in {path.split(".")[0] for path in candidate.guesses}
        ]
        if absent:
            yield f"not given: {', '.join(absent)}"
        if outcome.invented:
            yield f"the forward depends on values ({', '.join(outcome.invented)}): they were made up"

    def _not_found(self) -> InputsNotFound:
        arguments = ", ".join(parameter.name for parameter in self.facts.parameters)
        shown = self.tried[:4] + ["..."] * (len(self.tried) > 8) + self.tried[4:][-4:]
        furthest = f"; the furthest: {self.furthest[1]}" if self.furthest[1] not in shown else ""
        return InputsNotFound(
            f"no example inputs were found for forward({arguments}) in {len(self.tried)} tries",
            got="\n       ".join([*shown]) + furthest,
            help="pass example_inputs=(args, kwargs), such as example_inputs=((x,), {}) for model(x)",
        )


def _described(guess: Guess, consumer: str | None) -> str:
    if guess.kind == "value":
        return f"{guess.value!r}"
    text = f"all ones, {guess}" if guess.kind == "ones" else str(guess)
    return text + (f", first used by {consumer}" if consumer else "")
