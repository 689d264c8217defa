"""Trace the model's forward into one straight graph of operators, with every module call's inputs and outputs.

Reads the model and its example inputs. Decides nothing about sharding. Leaves the model alone: a twin is traced.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
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
from autoshard.quiet import quiet
from autoshard.twin import Twin, make_twin


@dataclass(frozen=True)
class Trace:
    """Trace a model.

    Attributes:
        given: example inputs, or None to synthesise them.
        shapes: the shapes of tensors that differ from the model's (a rank's share), by name.
        prepare: called with the twin before it is traced; may change it.
        after: called with (fqn, outputs) at the end of each module call of the traced twin; may replace the outputs.
        whole: trace every block, also those that repeat an earlier one.
    """

    given: Any = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    prepare: Callable[[nn.Module], None] | None = None
    after: Callable[[str, Any], Any] | None = None
    whole: bool = False

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
        return _trace(model, twin, inputs, self.after)


class _Flat(nn.Module):
    """Calls the twin and returns its tensors in a flat list, so that any output class can be exported."""

    def __init__(self, model: nn.Module, note: Callable[[list[tuple[str, bool]]], None]) -> None:
        super().__init__()
        self.model = model
        self.note = note  # export puts attributes back that a forward assigns: paths are handed out

    def forward(self, args: Any, kwargs: Any) -> list[Tensor]:
        result = self.model(*args, **kwargs)
        found = [(path, tensor, False) for path, tensor in tensors(result)]
        found += [(path, tensor, True) for path, tensor in states(result)]
        self.note([(path, state) for path, _, state in found])
        return [tensor for _, tensor, _ in found]


def _trace(model: nn.Module, twin: Twin, inputs: ExampleInputs, after: Callable[[str, Any], Any] | None) -> Traced:
    calls = CallRecorder(twin.model, after)
    paths: list[tuple[str, bool]] = []

    def note(found: list[tuple[str, bool]]) -> None:
        paths[:] = found

    flat = _Flat(twin.model, note)
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
    graph.walk(exported.graph_module, {})
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
        if not isinstance(leaf, Tensor) or isinstance(leaf, torch._subclasses.FakeTensor):
            return leaf
        with twin.mode:
            return torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", requires_grad=leaf.requires_grad)

    return torch.utils._pytree.tree_map(fake, value)
