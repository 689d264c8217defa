"""The frozen types that pass from stage to stage: what was traced, factored, cut and placed.

Nothing here imports torch: a traced graph is plain data, small enough to print.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Ref:
    """A use of a value inside an op's arguments."""

    name: str


@dataclass(frozen=True)
class Meta:
    """Shape (elements) and dtype name of a tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def is_float(self) -> bool:
        """Whether a gradient can flow through it."""
        return "float" in self.dtype or "complex" in self.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True)
class Source:
    """A value that the graph starts from.

    Attributes:
        name: the value's name in the graph.
        kind: ``parameter``, ``buffer``, ``constant`` or ``input``.
        fqn: the parameter's or buffer's first name in the model; the argument's name for an input.
        meta: its shape and dtype; None where it is not a tensor.
        trainable: whether it takes a gradient.
        numbers: the elements of a short vector of integers that the code holds as a constant; None for all else.
    """

    name: str
    kind: str
    fqn: str
    meta: Meta | None
    trainable: bool = False
    numbers: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Op:
    """One operator call.

    Attributes:
        name: the name of its result.
        target: such as ``aten.linear``: namespace and op, without overload.
        overload: such as ``default``.
        arguments: by the schema's argument names, defaults filled in; uses of values are ``Ref``.
        result: shape and dtype; a tuple for several results; None where it returns no tensor.
        module: the innermost module's name.
        calls: ids of the module calls it ran in, outermost first.
        where: the user's ``file:line``.
        mutates: names of the arguments it writes to.
        no_grad: whether it ran under ``torch.no_grad``.
        site: the instruction that made it, in code that was followed with made-up values; else empty.
    """

    name: str
    target: str
    overload: str
    arguments: Mapping[str, Any]
    result: Meta | tuple[Meta | None, ...] | None
    module: str
    calls: tuple[int, ...]
    where: str
    mutates: tuple[str, ...] = ()
    no_grad: bool = False
    site: str = ""

    def refs(self) -> list[str]:
        """Return the names of the values it reads, in order, with repeats."""
        return self._refs

    @cached_property
    def _refs(self) -> list[str]:
        return references(self.arguments)


def references(value: Any) -> list[str]:
    """Return every value named inside nested arguments."""
    if value is None or isinstance(value, (str, int, float)):
        return []  # first, as most arguments are such: to ask for a mapping is slow
    if isinstance(value, Ref):
        return [value.name]
    if isinstance(value, (list, tuple)):
        return [name for item in value for name in references(item)]
    if isinstance(value, Mapping):
        return [name for item in value.values() for name in references(item)]
    return []


@dataclass(frozen=True)
class Call:
    """One call of one module, as the trace saw it.

    Attributes:
        id: unique in the trace, in order of entry.
        fqn: the module's name.
        parent: id of the call that made it, or None.
        inputs: argument path (``"hidden_states"``, ``"position_embeddings.0"``) to value.
        outputs: output path (``""``, ``"0"``, ``"logits"``) to value.
        kind: the module's class, for messages only: no decision reads it.
    """

    id: int
    fqn: str
    parent: int | None
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    kind: str


@dataclass(frozen=True)
class Output:
    """A tensor that leaves the model.

    Attributes:
        path: where in the returned object, such as ``logits``.
        value: the value's name.
        state: whether it sits in an object that the model gets back later (a cache) rather than in the answer.
    """

    path: str
    value: str
    state: bool


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer of the model.

    Attributes:
        fqn: its first name.
        names: all its names: more than one where it is tied or its module is registered twice.
        meta: shape and dtype.
        trainable: whether it takes a gradient.
        value: its value in the graph, or None where the trace does not use it.
    """

    fqn: str
    names: tuple[str, ...]
    meta: Meta
    trainable: bool
    value: str | None


@dataclass(frozen=True)
class Untraced:
    """A module whose own code could not be traced; the modules it calls may be traced all the same.

    Attributes:
        fqn: its name.
        where: the user's ``file:line`` that stopped the trace.
        why: the reason, one sentence.
    """

    fqn: str
    where: str
    why: str


@dataclass(frozen=True)
class Traced:
    """The model as one straight graph, in execution order.

    Attributes:
        containers: children of each outermost list of blocks, by name.
        workload_dims: what each dim of an input stands for: ``batch``, ``sequence`` or None.
        copies: the traced block by the name of each block that was written out as a copy of it.
        inputs: the example inputs it was traced with, opaque here: another trace of the model may take the same.
        untraced: the modules whose own code is one operator, ``autoshard.opaque``, in the graph.
        sometimes: modules that code which was not traced may call for some inputs and not for others.
    """

    model: str
    sources: tuple[Source, ...]
    ops: tuple[Op, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Output, ...]
    parameters: tuple[Tensor, ...]
    buffers: tuple[Tensor, ...]
    containers: tuple[tuple[str, ...], ...] = ()
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    workload_dims: Mapping[str, tuple[str | None, ...]] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    inputs: Any = field(default=None, compare=False, repr=False)
    untraced: tuple[Untraced, ...] = ()
    sometimes: frozenset[str] = frozenset()

    def metas(self) -> dict[str, Meta]:
        """Return the shape and dtype of every single-tensor value."""
        found = {s.name: s.meta for s in self.sources if s.meta is not None}
        found.update({op.name: op.result for op in self.ops if isinstance(op.result, Meta)})
        return found
