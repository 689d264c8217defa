"""Repeat traced blocks: the graph of a shallow twin becomes the graph of the whole model.

Tracing is the cost of planning, and siblings in a list of blocks trace alike. So the twin keeps each kind of block
twice, this pass checks that the two copies are alike, op for op, and writes the others as further copies. What does not
follow the pattern raises ``NotAlike``, and the whole model is traced instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import nn

from autoshard.ir import Call, Op, Output, Ref, Source, Traced
from autoshard.passes.counted import attributes_in_branches, decides_by, handed_numbers, loops_by_number


class NotAlike(Exception):
    """Blocks that should repeat do not."""


@dataclass(frozen=True)
class Repeats:
    """A list of blocks of which only the first few are traced.

    Attributes:
        children: names of all blocks.
        kept: how many are traced.
        kinds: for each block, a number that is the same for blocks alike.
    """

    children: tuple[str, ...]
    kept: int
    kinds: tuple[int, ...]

    @property
    def container(self) -> str:
        """The list's own name."""
        return self.children[0].rpartition(".")[0]


def find_repeats(model: nn.Module, containers: tuple[tuple[str, ...], ...]) -> tuple[Repeats, ...]:
    """Return the lists of blocks that are longer than the second of each kind.

    Two blocks are of one kind if their classes, their parameters' shapes and every plain attribute of every module in
    them agree; an attribute that holds the block's own number may differ, if no code decides by it. Where a loop
    decides by the number of a block, or a block by one that a loop hands to it, all are traced.
    """
    found = []
    within = {id(m) for names in containers for name in names for m in model.get_submodule(name).modules()}
    outside = [module for module in model.modules() if id(module) not in within]
    if any(loops_by_number(module) for module in outside):
        return ()
    handed = frozenset(place for module in outside for place in handed_numbers(module))
    for children in containers:
        if not isinstance(model.get_submodule(children[0].rpartition(".")[0]), nn.ModuleList):
            continue
        blocks = [model.get_submodule(child) for child in children]
        if any(isinstance(block, nn.ModuleList) for block in blocks):
            continue  # a list of lists is not called: the lists in it may repeat
        if any(decides_by(block, handed) for block in blocks):
            continue
        counters = _counters(blocks)
        numbers: dict[Any, int] = {}
        kinds = tuple(numbers.setdefault(_kind(block, counters), len(numbers)) for block in blocks)
        places = [[i for i, kind in enumerate(kinds) if kind == number] for number in numbers.values()]
        kept = max(place[min(1, len(place) - 1)] for place in places) + 1
        if kept < len(children):
            found.append(Repeats(children, kept, kinds))
    return tuple(found)


def _counters(blocks: list[nn.Module]) -> set[tuple[str, str]]:
    """Return the attributes, as (module, name), that hold the block's own number in every block and decide nothing."""
    found: dict[tuple[str, str], bool] = {}
    for index, block in enumerate(blocks):
        for name, module in block.named_modules():
            decisive = attributes_in_branches(module)
            for key, value in vars(module).items():
                if type(value) is int:
                    found[name, key] = found.get((name, key), True) and value == index and key not in decisive
    return {place for place, counts in found.items() if counts}


def _kind(block: nn.Module, counters: set[tuple[str, str]]) -> tuple[Any, ...]:
    rows: list[Any] = []
    for name, module in block.named_modules():
        plain = sorted(
            (key, str(value))
            for key, value in vars(module).items()
            if isinstance(value, (int, float, str)) and (name, key) not in counters
        )
        tensors = [
            (k, tuple(t.shape), t.dtype, t.requires_grad) for k, t in module._parameters.items() if t is not None
        ]
        buffers = [(k, tuple(t.shape), t.dtype) for k, t in module._buffers.items() if t is not None]
        rows.append((name, type(module), tuple(plain), tuple(tensors), tuple(buffers)))
    return tuple(rows)


def unroll(traced: Traced, repeats: Repeats) -> Traced:
    """Return the graph with every block of the list in it.

    Raises:
        NotAlike: the traced blocks do not follow one pattern.
    """
    return _Unroll(traced, repeats).run()


@dataclass
class _Block:
    """One traced block: its call, the calls and ops inside, and the values that come in."""

    call: Call
    calls: list[Call]
    ops: list[Op]
    made: set[str] = field(default_factory=set)


class _Unroll:
    def __init__(self, traced: Traced, repeats: Repeats) -> None:
        self.traced = traced
        self.repeats = repeats
        self.sources = {source.name: source for source in traced.sources}
        self.copies: dict[str, str] = {}
        self.next_call = max((call.id for call in traced.calls), default=0) + 1

    def run(self) -> Traced:
        blocks = [self._block(child) for child in self.repeats.children[: self.repeats.kept]]
        self._check_glue(blocks)
        self._check_alike(blocks)
        copies: list[_Block] = []
        new_sources: list[Source] = []
        for number in range(self.repeats.kept, len(self.repeats.children)):
            pattern = max(i for i in range(len(blocks)) if self.repeats.kinds[i] == self.repeats.kinds[number])
            previous = copies[-1] if copies else blocks[-1]
            copy, sources = self._copy(blocks, pattern, number, previous)
            self.copies[self.repeats.children[number]] = self.repeats.children[pattern]
            copies.append(copy)
            new_sources += sources
        return self._joined(blocks, copies, new_sources)

    def _block(self, child: str) -> _Block:
        calls = [call for call in self.traced.calls if call.fqn == child]
        if len(calls) != 1:
            raise NotAlike(f"{child} is called {len(calls)} times")
        inside = {calls[0].id}
        for call in self.traced.calls:
            if call.parent in inside:
                inside.add(call.id)
        ops = [op for op in self.traced.ops if calls[0].id in op.calls]
        below = [call for call in self.traced.calls if call.id in inside]
        return _Block(calls[0], below, ops, {op.name for op in ops})

    def _check_glue(self, blocks: list[_Block]) -> None:
        """Between the blocks nothing may happen, and what they make may go to the next block only."""
        order = {op.name: i for i, op in enumerate(self.traced.ops)}
        for one, two in pairwise(blocks):
            if not one.ops or not two.ops or order[two.ops[0].name] != order[one.ops[-1].name] + 1:
                raise NotAlike("the model works between its blocks")
        for one, two in pairwise(blocks):
            for op in self.traced.ops:
                if op.name not in one.made and op.name not in two.made and one.made & set(op.refs()):
                    raise NotAlike("what a block makes is used beyond the next block")
        returned = {o.value for o in self.traced.outputs if not o.state}
        if any(block.made & returned for block in blocks[:-1]):
            raise NotAlike("the model returns what a block makes")

    def _check_alike(self, blocks: list[_Block]) -> None:
        """Copy each block onto the later one of its kind, and require the copy to be that one."""
        for number in range(1, len(blocks)):
            earlier = [i for i in range(1, number) if self.repeats.kinds[i] == self.repeats.kinds[number]]
            # the first block may take other values than its followers do, so it is compared by its ops alone
            if self.repeats.kinds[0] == self.repeats.kinds[number] and not earlier:
                _same_ops(blocks[0], blocks[number])
            for i in earlier:
                _same_ops(blocks[i], blocks[number])

    def _copy(self, blocks: list[_Block], pattern: int, number: int, previous: _Block) -> tuple[_Block, list[Source]]:
        block = blocks[pattern]
        old, new = self.repeats.children[pattern], self.repeats.children[number]
        suffix = f"__{self.repeats.container.replace('.', '_')}_{number}"
        names = {name: name + suffix for name in block.made}
        sources: list[Source] = []
        if pattern == 0:
            raise NotAlike("one block alone says nothing of what its followers take")
        before = blocks[pattern - 1]
        for value in _taken(block):
            if value in self.sources and self.sources[value].kind in ("parameter", "buffer", "input"):
                source = self.sources[value]
                if source.fqn.startswith((old + ".", old + ":")):
                    names[value] = value + suffix
                    sources.append(replace(source, name=value + suffix, fqn=new + source.fqn.removeprefix(old)))
            elif value in before.made:
                names[value] = _same_output(before.call, value, previous.call)
            elif any(value in other.made for other in blocks):
                raise NotAlike("a block takes what an earlier one made")
        ids = {call.id: self.next_call + i for i, call in enumerate(block.calls)}
        self.next_call += len(ids)
        calls = [_copied_call(call, ids, names, old, new) for call in block.calls]
        ops = [_copied_op(op, ids, names, old, new) for op in block.ops]
        return _Block(calls[0], calls, ops, {op.name for op in ops}), sources

    def _joined(self, blocks: list[_Block], copies: list[_Block], sources: list[Source]) -> Traced:
        last, end = blocks[-1], copies[-1]
        renamed = {value: _same_output(last.call, value, end.call) for value in last.call.outputs.values()}
        before = self.traced.ops.index(last.ops[-1]) + 1
        head = list(self.traced.ops[:before])
        tail = [replace(op, arguments=_renamed(op.arguments, renamed)) for op in self.traced.ops[before:]]
        kept_calls = {call.id for block in blocks for call in block.calls}
        calls = []
        for call in self.traced.calls:
            if call.id in kept_calls:
                calls.append(call)
                continue
            later = call.id > last.calls[-1].id
            inputs = {p: renamed.get(v, v) for p, v in call.inputs.items()} if later else dict(call.inputs)
            calls.append(replace(call, inputs=inputs, outputs={p: renamed.get(v, v) for p, v in call.outputs.items()}))
        calls += [call for copy in copies for call in copy.calls]
        outputs = [replace(o, value=o.value if o.state else renamed.get(o.value, o.value)) for o in self.traced.outputs]
        outputs += self._states(blocks, copies)
        values = {s.fqn: s.name for s in sources}
        return replace(
            self.traced,
            sources=(*self.traced.sources, *sources),
            ops=(*head, *(op for copy in copies for op in copy.ops), *tail),
            calls=tuple(calls),
            outputs=tuple(outputs),
            copies={**self.traced.copies, **self.copies},
            parameters=tuple(replace(p, value=p.value or values.get(p.fqn)) for p in self.traced.parameters),
            buffers=tuple(replace(b, value=b.value or values.get(b.fqn)) for b in self.traced.buffers),
        )

    def _states(self, blocks: list[_Block], copies: list[_Block]) -> list[Output]:
        found = []
        for number, copy in enumerate(copies, self.repeats.kept):
            suffix = f"__{self.repeats.container.replace('.', '_')}_{number}"
            for output in self.traced.outputs:
                value = output.value + suffix
                if output.state and value in copy.made:
                    steps = [str(number) if step.isdigit() else step for step in output.path.split(".")]
                    found.append(replace(output, path=".".join(steps), value=value))
        return found


def _taken(block: _Block) -> list[str]:
    """Return what a block reads and does not make, and what its calls are given."""
    read = [name for op in block.ops for name in op.refs()]
    read += [v for call in block.calls for v in (*call.inputs.values(), *call.outputs.values())]
    return [name for name in dict.fromkeys(read) if name not in block.made]


def _same_output(call: Call, value: str, other: Call) -> str:
    """Return what ``other`` returns where ``call`` returns ``value``."""
    for path, made in call.outputs.items():
        if made == value and path in other.outputs:
            return other.outputs[path]
    raise NotAlike("a block takes from the one before what that does not return")


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if value is None or isinstance(value, (str, int, float)):
        return value  # first, as most arguments are such: to ask for a mapping is slow
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    if isinstance(value, Mapping):
        return {key: _renamed(item, names) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_renamed(item, names) for item in value)
    return value


def _copied_call(call: Call, ids: Mapping[int, int], names: Mapping[str, str], old: str, new: str) -> Call:
    return replace(
        call,
        id=ids[call.id],
        fqn=new + call.fqn.removeprefix(old),
        parent=call.parent if call.parent is None else ids.get(call.parent, call.parent),
        inputs={path: names.get(v, v) for path, v in call.inputs.items()},
        outputs={path: names.get(v, v) for path, v in call.outputs.items()},
    )


def _copied_op(op: Op, ids: Mapping[int, int], names: Mapping[str, str], old: str, new: str) -> Op:
    return replace(
        op,
        name=names[op.name],
        arguments=_renamed(op.arguments, names),
        module=new + op.module.removeprefix(old),
        calls=tuple(ids.get(call, call) for call in op.calls),
    )


def _same_ops(one: _Block, two: _Block) -> None:
    """Require that two blocks run the same ops on values that correspond."""
    if len(one.ops) != len(two.ops) or len(one.calls) != len(two.calls):
        raise NotAlike("two blocks of one kind run different ops")
    names: dict[str, str] = {}
    for a, b in zip(one.ops, two.ops, strict=True):
        names[a.name] = b.name
        if (a.target, a.overload, a.result, a.where, a.no_grad) != (b.target, b.overload, b.result, b.where, b.no_grad):
            raise NotAlike("two blocks of one kind run different ops")
        left, right = a.refs(), b.refs()
        if len(left) != len(right) or any(names.get(x, y) != y for x, y in zip(left, right, strict=True)):
            raise NotAlike("two blocks of one kind wire their ops differently")
        if _plain(a.arguments) != _plain(b.arguments):
            raise NotAlike("two blocks of one kind use different numbers")


def _plain(value: Any) -> Any:
    """Return arguments with every reference replaced by one mark."""
    if isinstance(value, Ref):
        return "%"
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    return value
