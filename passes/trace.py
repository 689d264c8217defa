"""Trace the model's forward into one straight graph of operators, with every module call's inputs and outputs.

Reads the model and its example inputs. Decides nothing about sharding. Leaves the model alone: a twin is traced.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autoshard._torch import NO_VALUES, GraphRecorder
from autoshard.calls import CallRecorder
from autoshard.errors import AutoshardError, TraceError
from autoshard.exported import GraphReader, containers_of, first_unread, user_place, user_places
from autoshard.inputs import ExampleInputs, example_inputs
from autoshard.ir import Traced, Untraced
from autoshard.observed import fakes, observe
from autoshard.outputs import answer, states, tensors
from autoshard.passes.opaque import Opaque
from autoshard.passes.spare import templates, uncalled
from autoshard.passes.unreached import unreached
from autoshard.passes.unroll import NotAlike, find_repeats, unroll
from autoshard.quiet import quiet
from autoshard.twin import Twin, make_twin
from autoshard.words import fold_names

_UNTRACED = "the model's forward could not be traced"
_HELP = "remove the branch on tensor values at that line, or pass example_inputs that avoid it"


@dataclass(frozen=True)
class Trace:
    """Trace a model.

    Attributes:
        given: example inputs, those of an earlier trace, or None to synthesise them.
        shapes: the shapes of tensors that differ from the model's (a rank's share), by name.
        prepare: called with the twin before it is traced; may change it.
        after: called with (fqn, outputs) at the end of each module call of the traced twin; may replace the outputs.
        whole: trace every block, also those that repeat an earlier one.
        joined: write the blocks that repeat into the graph; else they are not in it.
        tracker: notes what becomes of integer attributes.
    """

    given: Any = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    prepare: Callable[[nn.Module], None] | None = None
    after: Callable[[str, Any], Any] | None = None
    whole: bool = False
    joined: bool = True
    tracker: Follower | None = None

    def run(self, model: nn.Module) -> Traced:
        """Return the graph of ``model``'s forward.

        Modules whose own code cannot be traced are kept out of it, where the forward runs all the same: ``untraced``.

        Raises:
            InputsNotFound: no inputs were given and none could be made.
            TraceError: the forward does not run, or what an earlier trace could follow cannot be followed any more;
                its cause is a ``Stopped`` that says where.
        """
        traced = self._run(model)
        missed = unreached(model, traced) if self._may_grow else None
        return replace(traced, warnings=(*traced.warnings, missed)) if missed else traced

    def _run(self, model: nn.Module) -> Traced:
        trace = self
        repeats = () if self.whole else find_repeats(model, containers_of(model))
        if repeats and not self.joined:
            return self._followed(model, {r.container: r.kept for r in repeats})[0]
        if repeats:
            try:
                shallow, trace = self._followed(model, {r.container: r.kept for r in repeats})
                for one in repeats:
                    shallow = unroll(shallow, one)
            except (NotAlike, AutoshardError):
                pass  # whatever is wrong with the blocks shows on the whole model
            else:
                return shallow
        return trace._followed(model, {})[0]

    def _followed(self, model: nn.Module, lengths: Mapping[str, int]) -> tuple[Traced, Trace]:
        """Trace again and again, each time with what stopped the trace kept out; return the trace that passed too."""
        trace = self
        while True:
            try:
                return self._with_uncalled(model, trace._once(model, lengths), trace, lengths)
            except Stopped as stop:
                if not self._may_grow or (lengths and not stop.depends_on_values):
                    raise stop.error from stop
                opaque = _grown(model, stop)
                if opaque is None:
                    raise stop.error from stop
                trace = replace(self, given=replace(stop.inputs, opaque=opaque))

    def _with_uncalled(
        self, model: nn.Module, traced: Traced, trace: Trace, lengths: Mapping[str, int]
    ) -> tuple[Traced, Trace]:
        """Trace again with the modules that the forward did not call, where there are some like those it did."""
        pairs = uncalled(model, traced) if self._may_grow else {}
        opaque = traced.inputs.opaque
        observed = (opaque.observed or observe(model, traced.inputs)) if pairs else None
        wanted = templates(model, pairs, observed) if observed is not None else {}
        if not wanted:
            return traced, trace
        more = replace(self, given=replace(traced.inputs, opaque=replace(opaque, observed=observed, spare=wanted)))
        try:
            return more._once(model, lengths), more
        except Stopped:
            return traced, trace

    @property
    def _may_grow(self) -> bool:
        """Whether this is the first trace: a later one is compared with it, and keeps the same modules out."""
        given = self.given
        first = self.prepare is None and self.after is None and self.tracker is None and not self.shapes
        return first and not (isinstance(given, ExampleInputs) and given.opaque is not None and given.opaque.final)

    def _once(self, model: nn.Module, lengths: Mapping[str, int]) -> Traced:
        twin = make_twin(model, self.shapes, lengths)
        if self.prepare is not None:
            self.prepare(twin.model)
        inputs = example_inputs(twin.model, self.given)
        if self.tracker is not None:
            self.tracker.prepare(twin.model)
        around = nullcontext() if inputs.opaque is None else inputs.opaque.install(twin.model, model)
        return _trace(model, twin, inputs, self.after, self.tracker, around)


class Follower(Protocol):
    """What is told of a forward while it is traced.

    Attributes:
        recorder: marks the graph's nodes; set before the forward runs.
        names: value by mark; set when the graph has been read.
    """

    recorder: GraphRecorder | None
    names: Mapping[int, str]

    def prepare(self, twin: nn.Module) -> None:
        """See the twin before it runs, and forget what an earlier one did; may change it."""

    def mode(self) -> AbstractContextManager[Any]:
        """Return the mode to run the forward in."""


class Stopped(Exception):
    """Export could not follow the forward.

    Attributes:
        inputs: what the forward was traced with.
        module: the innermost module whose code it was, ``""`` where that is not known.
        error: what to raise where nothing helps.
        depends_on_values: whether the code asked for the value of a tensor.
        places: the user's ``file:line`` of each frame on the way to what raised, the innermost first.
    """

    def __init__(
        self,
        inputs: ExampleInputs,
        module: str,
        error: TraceError,
        depends_on_values: bool,
        places: tuple[str, ...] = (),
    ) -> None:
        super().__init__(str(error))
        self.inputs = inputs
        self.module = module
        self.error = error
        self.depends_on_values = depends_on_values
        self.places = places


def _grown(model: nn.Module, stop: Stopped) -> Opaque | None:
    """Return what to keep out next; None where the forward does not run either, or nothing is left to keep out."""
    opaque = stop.inputs.opaque or Opaque(observed=observe(model, stop.inputs))
    if opaque.observed is None:
        return None
    what = "its code depends on the values of tensors" if stop.depends_on_values else str(stop.error.got)
    found: Opaque | None = opaque.grown(model, Untraced(stop.module, stop.error.at or "", f"cannot be traced: {what}"))
    return found


class _Flat(nn.Module):
    """Calls the twin and returns its tensors in a flat list, so that any output class can be exported."""

    def __init__(
        self,
        model: nn.Module,
        note: Callable[[list[tuple[str, bool]]], None],
        around: tuple[AbstractContextManager[Any], AbstractContextManager[Any]],
    ) -> None:
        super().__init__()
        self.model = model
        self.around = around
        self.note = note  # export puts attributes back that a forward assigns: paths are handed out

    def forward(self, args: Any, kwargs: Any) -> list[Tensor]:
        with self.around[0], self.around[1]:
            result = answer(self.model(*args, **kwargs))
        found = [(path, tensor, False) for path, tensor in tensors(result)]
        found += [(path, tensor, True) for path, tensor in states(result)]
        self.note([(path, state) for path, _, state in found])
        return [tensor for _, tensor, _ in found]


def _trace(
    model: nn.Module,
    twin: Twin,
    inputs: ExampleInputs,
    after: Callable[[str, Any], Any] | None,
    tracker: Follower | None,
    around: AbstractContextManager[Any],
) -> Traced:
    calls = CallRecorder(twin.model, after)
    paths: list[tuple[str, bool]] = []

    def note(found: list[tuple[str, bool]]) -> None:
        paths[:] = found

    if tracker is not None:
        tracker.recorder = calls.recorder
    flat = _Flat(twin.model, note, (tracker.mode() if tracker is not None else nullcontext(), around))
    args, kwargs = fakes((inputs.args, inputs.kwargs), twin)
    handles = calls.attach()
    try:
        with torch.enable_grad(), quiet():
            exported = torch.export.export(flat, (args, kwargs), strict=False)
    except Exception as error:  # export lets any error of the user's forward through
        places = tuple(reversed(user_places("".join(traceback.format_tb(error.__traceback__)))))
        module = calls.open_call() or ""
        raise Stopped(inputs, module, _trace_error(error), _depends_on_values(error), places) from error
    finally:
        for handle in handles:
            handle.remove()
    unread = first_unread(exported.graph_module)
    if unread is not None:
        refusal = TraceError(_UNTRACED, at=unread.where or None, got=unread.why, help=_HELP)
        raise Stopped(inputs, calls.caller(unread.call) or "", refusal, unread.depends_on_values)
    graph = GraphReader(model, twin, exported, inputs)
    graph.walk(exported.graph_module, {})
    if tracker is not None:
        tracker.names = dict(graph.marks)
    return _told(model, graph.traced(calls, paths, inputs), inputs.opaque or Opaque())


def _told(model: nn.Module, traced: Traced, opaque: Opaque) -> Traced:
    """Return the graph with what was kept out of it, and inputs with which another trace keeps out the same."""
    parts = opaque.untraced
    return replace(
        traced,
        inputs=replace(traced.inputs, opaque=replace(opaque, final=True)),
        untraced=parts,
        sometimes=opaque.sometimes(model),
        warnings=(*traced.warnings, *_warnings(parts)),
        assumptions=(*traced.assumptions, *_assumptions(opaque)),
    )


def _warnings(parts: tuple[Untraced, ...]) -> Iterator[str]:
    by_place: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        by_place.setdefault((part.where, part.why), []).append(part.fqn or "the model")
    for (where, why), names in by_place.items():
        more = f" and {len(names) - 1} like it" if len(names) > 1 else ""
        yield f"{names[0]}{more}: {where + ': ' if where else ''}{why}; what its own code uses stays whole"


def _assumptions(opaque: Opaque) -> Iterator[str]:
    if opaque.parts and opaque.observed is not None:
        how = "one run of the forward" if opaque.observed.real else "a forward run on made-up values"
        if opaque.untraced:
            yield f"what code that cannot be traced returns, and the modules it calls, are those of {how}"
    if opaque.guesses:
        some = ", ".join(fold_names(name or "the model" for name in opaque.guesses))
        yield f"code that asks for the values of tensors was followed with made-up ones: {some}"
    if opaque.spare:
        some = ", ".join(fold_names(opaque.spare))
        yield f"not called in the trace, and planned like modules of their class that are: {some}"


def _trace_error(error: Exception) -> TraceError:
    lines = str(error).strip().splitlines()
    stack = "".join(traceback.format_tb(error.__traceback__))
    return TraceError(
        _UNTRACED,
        at=user_place(str(error)) or user_place(stack) or None,
        got=f"{type(error).__name__}: {lines[0] if lines else ''}"[:300],
        help=_HELP,
    )


def _depends_on_values(error: Exception) -> bool:
    return isinstance(error, NO_VALUES) or "data-dependent" in str(error).lower()
