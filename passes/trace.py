"""Trace the model's forward into one straight graph of operators, with every module call's inputs and outputs.

Reads the model and its example inputs. Decides nothing about sharding. Leaves the model alone: a twin is traced.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.calls import CallRecorder
from autoshard.errors import AutoshardError, TraceError
from autoshard.exported import GraphReader, containers_of, user_place
from autoshard.inputs import ExampleInputs, example_inputs
from autoshard.ir import Traced
from autoshard.outputs import states, tensors
from autoshard.passes.unroll import NotAlike, find_repeats, unroll
from autoshard.provenance import Tracker
from autoshard.quiet import quiet
from autoshard.twin import Twin, make_twin


@dataclass(frozen=True)
class Trace:
    """Trace a model.

    Attributes:
        given: example inputs, those of an earlier trace, or None to synthesise them.
        shapes: the shapes of tensors that differ from the model's (a rank's share), by name.
        prepare: called with the twin before it is traced; may change it.
        after: called with (fqn, outputs) at the end of each module call of the traced twin; may replace the outputs.
        whole: trace every block, also those that repeat an earlier one.
        tracker: notes what becomes of integer attributes.
    """

    given: Any = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    prepare: Callable[[nn.Module], None] | None = None
    after: Callable[[str, Any], Any] | None = None
    whole: bool = False
    tracker: Tracker | None = None

    def run(self, model: nn.Module) -> Traced:
        """Return the graph of ``model``'s forward.

        Raises:
            InputsNotFound: no inputs were given and none could be made.
            TraceError: torch.export could not follow the forward.
        """
        repeats = () if self.whole else find_repeats(model, containers_of(model))
        if repeats:
            try:
                shallow = self._once(model, {r.container: r.kept for r in repeats})
                for one in repeats:
                    shallow = unroll(shallow, one)
            except (NotAlike, AutoshardError):
                return self._once(model, {})  # whatever is wrong with the blocks shows on the whole model
            return shallow
        return self._once(model, {})

    def _once(self, model: nn.Module, lengths: Mapping[str, int]) -> Traced:
        twin = make_twin(model, self.shapes, lengths)
        if self.prepare is not None:
            self.prepare(twin.model)
        inputs = example_inputs(twin.model, self.given)
        if self.tracker is not None:
            self.tracker.prepare(twin.model)
        return _trace(model, twin, inputs, self.after, self.tracker)


class _Flat(nn.Module):
    """Calls the twin and returns its tensors in a flat list, so that any output class can be exported."""

    def __init__(
        self, model: nn.Module, note: Callable[[list[tuple[str, bool]]], None], around: AbstractContextManager[Any]
    ) -> None:
        super().__init__()
        self.model = model
        self.around = around
        self.note = note  # export puts attributes back that a forward assigns: paths are handed out

    def forward(self, args: Any, kwargs: Any) -> list[Tensor]:
        with self.around:
            result = self.model(*args, **kwargs)
        found = [(path, tensor, False) for path, tensor in tensors(result)]
        found += [(path, tensor, True) for path, tensor in states(result)]
        self.note([(path, state) for path, _, state in found])
        return [tensor for _, tensor, _ in found]


def _trace(
    model: nn.Module,
    twin: Twin,
    inputs: ExampleInputs,
    after: Callable[[str, Any], Any] | None,
    tracker: Tracker | None,
) -> Traced:
    calls = CallRecorder(twin.model, after)
    paths: list[tuple[str, bool]] = []

    def note(found: list[tuple[str, bool]]) -> None:
        paths[:] = found

    if tracker is not None:
        tracker.recorder = calls.recorder
    flat = _Flat(twin.model, note, tracker.mode() if tracker is not None else nullcontext())
    args, kwargs = _fakes((inputs.args, inputs.kwargs), twin)
    handles = calls.attach()
    try:
        with torch.enable_grad(), quiet():
            exported = torch.export.export(flat, (args, kwargs), strict=False)
    except Exception as error:  # export lets any error of the user's forward through
        raise _trace_error(error) from error
    finally:
        for handle in handles:
            handle.remove()
    graph = GraphReader(model, twin, exported, inputs)
    try:
        graph.walk(exported.graph_module, {})
    except RuntimeError as error:  # an extent that depends on values has no size
        raise _trace_error(error) from error
    if tracker is not None:
        tracker.names = dict(graph.marks)
    return graph.traced(calls, paths, inputs)


def _trace_error(error: Exception) -> TraceError:
    lines = str(error).strip().splitlines()
    stack = "".join(traceback.format_tb(error.__traceback__))
    return TraceError(
        "the model's forward could not be traced",
        at=user_place(str(error)) or user_place(stack) or None,
        got=f"{type(error).__name__}: {lines[0] if lines else ''}"[:300],
        help="remove the branch on tensor values at that line, or pass example_inputs that avoid it",
    )


def _fakes(value: Any, twin: Twin) -> Any:
    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or getattr(leaf, "fake_mode", None) is twin.mode:
            return leaf
        with twin.mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", requires_grad=leaf.requires_grad)

    return torch.utils._pytree.tree_map(fake, value)
