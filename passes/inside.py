"""Where a value can change state inside a module's own code: an argument of a call, or the call itself.

Where no module boundary can carry a conversion, the text of the argument or call is wrapped: ``h`` becomes
``convert("R->V", h)`` in the module's own copy of the code. This finds those texts, in one more trace of the model.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from autoshard._torch import GraphRecorder
from autoshard.ir import Op, Traced
from autoshard.passes.trace import Trace
from autoshard.rewrite.sites import Site, Sites, is_straight
from autoshard.rewrite.source import unparsed


@dataclass(frozen=True)
class Text:
    """An expression in the code of a module.

    Attributes:
        module: the module that owns the code.
        function: the method, and the functions on the way; see ``CallRewrite``.
        where: ``file:line``.
        column: where it begins in that line.
        text: the expression, spaces normalised.
    """

    module: str
    function: str
    where: str
    column: int
    text: str


@dataclass(frozen=True)
class Inside:
    """The texts of a traced model.

    Attributes:
        results: the text of the call that made a value, by value.
        arguments: the text of an argument, by ``(value the call made, value it was given)``.
        copies: the block that was traced, by the name of each that was written out as a copy of it.
        arms: the arms of branches in which a call made a value, by value, where there are any; see ``Site``.
        straight: modules whose ``forward`` has no branch: it does for any arguments what it did in the trace.
    """

    results: Mapping[str, Text]
    arguments: Mapping[tuple[str, str], Text]
    copies: Mapping[str, str]
    arms: Mapping[str, frozenset[tuple[int, int]]]
    straight: frozenset[str]

    def result(self, op: Op) -> Text | None:
        """Return the text of the call that is ``op``."""
        suffix, block, copy = self._pattern(op)
        return _moved(self.results.get(op.name.removesuffix(suffix)), block, copy)

    def argument(self, op: Op, value: str) -> Text | None:
        """Return the text through which ``op`` is given a value."""
        suffix, block, copy = self._pattern(op)
        key = (op.name.removesuffix(suffix), value.removesuffix(suffix))
        return _moved(self.arguments.get(key), block, copy)

    def may_be_passed_by(self, op: Op, users: Iterable[Op]) -> bool:
        """Whether another run may come to one of the users without ``op``, which is in an arm of a branch they are not.

        Where a user's text is not known it is taken to be in the same arms.
        """
        suffix, _, _ = self._pattern(op)
        mine = self.arms.get(op.name.removesuffix(suffix), frozenset())
        known = (user.name.removesuffix(suffix) for user in users)
        return any(not mine <= self.arms.get(name, frozenset()) for name in known if name in self.results)

    def _pattern(self, op: Op) -> tuple[str, str, str]:
        """Return what the names of a copied block's values end with, the block it is a copy of, and its own name."""
        copy = op.module
        while copy and copy not in self.copies:
            copy = copy.rpartition(".")[0]
        if not copy:
            return "", "", ""
        container, _, number = copy.rpartition(".")
        return f"__{container.replace('.', '_')}_{number}", self.copies[copy], copy


def _moved(text: Text | None, block: str, copy: str) -> Text | None:
    if text is None or not block:
        return text
    if text.module != block and not text.module.startswith(block + "."):
        return None
    return Text(copy + text.module.removeprefix(block), text.function, text.where, text.column, text.text)


def find_texts(model: nn.Module, traced: Traced) -> Inside:
    """Trace the model once more and return the texts of its calls."""
    tracker = _Tracker()
    Trace(traced.inputs, tracker=tracker).run(model)
    results: dict[str, Text] = {}
    arms: dict[str, frozenset[tuple[int, int]]] = {}
    arguments: dict[tuple[str, str], Text] = {}
    twice: set[str] = set()
    torn: set[tuple[str, str]] = set()
    for mark, site, operands, given in tracker.noted:
        made = tracker.names.get(mark)
        if made is None or made in {tracker.names.get(inner) for inner in operands}:
            continue  # torch hands on what has the wanted dtype already: another text made it
        if made in results:
            twice.add(made)  # two calls, one op: which text it was is not clear
        results[made] = _text(site.module, site.function, site.file, site.node)
        if site.arms:
            arms[made] = site.arms
        for inner, written in given:
            value = tracker.names.get(inner)
            if value is not None and arguments.setdefault((made, value), written) != written:
                torn.add((made, value))  # given in two places, ``torch.mul(x, x)``: neither text is all of it
    for made in twice:
        results.pop(made)
    for key in torn:
        arguments.pop(key)
    straight = frozenset(fqn for fqn, module in model.named_modules(remove_duplicate=False) if is_straight(module))
    return Inside(results, arguments, traced.copies, arms, straight)


def _text(module: str, function: str, file: str, node: Any) -> Text:
    return Text(module, function, f"{Path(file).name}:{node.lineno}", node.col_offset, unparsed(node))


@dataclass
class _Tracker:
    """Notes the text of every call of torch; see ``Tracker`` of ``provenance`` for the protocol."""

    noted: list[tuple[int, Site, set[int], list[tuple[int, Text]]]] = field(default_factory=list)
    recorder: GraphRecorder | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    sites: Sites | None = None

    def prepare(self, twin: nn.Module) -> None:
        self.noted, self.names = [], {}  # a mark of an earlier twin's graph means another value
        self.sites = Sites(twin)

    def mode(self) -> TorchFunctionMode:
        return _Mode(self)

    def marks(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[tuple[Any, ...], int]:
        """Return the marks of the tensors among the arguments, by place: before the call, which may write into them."""
        if self.recorder is None:
            return {}
        found = {path: self.recorder.mark(tensor) for path, tensor in _tensors(args, kwargs)}
        return {path: mark for path, mark in found.items() if mark is not None}

    def note(self, count: int, marks: Mapping[tuple[Any, ...], int], result: Any) -> None:
        if not isinstance(result, Tensor) or self.recorder is None or self.sites is None:
            return
        site = self.sites.here()
        mark = self.recorder.mark(result) if site is not None else None
        if site is None or mark is None:
            return
        given = []
        for path, inner in marks.items():
            text = _argument(site, count, path)
            if text is not None:
                given.append((inner, text))
        self.noted.append((mark, site, set(marks.values()), given))


def _argument(site: Site, count: int, path: tuple[Any, ...]) -> Text | None:
    """Return the text of an argument; of the tensor itself where its method is called."""
    if path == (0,) and not site.is_function and isinstance(site.node, ast.Call):
        receiver = site.node.func.value if isinstance(site.node.func, ast.Attribute) else None
        return None if receiver is None else _text(site.module, site.function, site.file, receiver)
    if isinstance(site.node, ast.Subscript):
        return _text(site.module, site.function, site.file, site.node.value) if path == (0,) else None
    written = site.written(count, path)
    if written is None or written.item is not None:
        return None
    return Text(written.module, written.function, written.where, written.column, written.text)


class _Mode(TorchFunctionMode):
    def __init__(self, tracker: _Tracker) -> None:
        super().__init__()
        self.tracker = tracker

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        marks = self.tracker.marks(args, kwargs or {})
        result = function(*args, **(kwargs or {}))
        self.tracker.note(len(args), marks, result)
        return result


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield the tensors among the arguments, with their places."""
    for place, value in [*enumerate(args), *kwargs.items()]:
        if isinstance(value, Tensor):
            yield (place,), value
        elif isinstance(value, (list, tuple)):
            for item, inner in enumerate(value):
                if isinstance(inner, Tensor):
                    yield (place, item, len(value)), inner
