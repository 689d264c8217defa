"""An exported program as plain data: sub-graphs inlined, no-op conversions removed, ties made one value."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves

from autoshard._torch import GraphRecorder
from autoshard.calls import CallRecorder
from autoshard.inputs import ExampleInputs
from autoshard.ir import Call, Meta, Op, Output, Ref, Source, Traced
from autoshard.ir import Tensor as Held
from autoshard.twin import Twin

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_SHORT = 64
_BY_VALUES = "its code depends on the values of tensors"
_ASSERTIONS = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range")


class GraphReader:
    """Turns the exported graph into plain data, sub-graphs inlined, no-op conversions removed."""

    def __init__(self, model: nn.Module, twin: Twin, exported: Any, inputs: ExampleInputs) -> None:
        self.model = model
        self.twin = twin
        self.exported = exported
        self.sources: dict[str, Source] = {}
        self.ops: list[Op] = []
        self.alias: dict[str, str] = {}
        self.marks: dict[int, str] = {}
        self.calls_of: dict[str, int] = {}
        self.metas: dict[str, Meta | None] = {}
        self.outputs: list[str] = []
        self.tuples: dict[str, list[Any]] = {}
        self.no_grad = False
        self.first_name = {
            id(t): n
            for n, t in reversed(
                [
                    *twin.model.named_parameters(remove_duplicate=False),
                    *twin.model.named_buffers(remove_duplicate=False),
                ]
            )
        }
        self.held = dict(
            [*twin.model.named_parameters(remove_duplicate=False), *twin.model.named_buffers(remove_duplicate=False)]
        )
        self.value_of: dict[str, str] = {}
        self.specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs}

    # ---- nodes
    def walk(self, module: fx.GraphModule, inner: dict[str, Any], prefix: str = "") -> Any:
        """Add every node of ``module``; ``inner`` maps a sub-graph's placeholders to outer values."""
        result: Any = None
        for node in module.graph.nodes:
            if prefix and node.op == "placeholder":
                self._note(node, inner[node.name].name if isinstance(inner[node.name], Ref) else "")
            elif node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                result = self._convert(node.args[0], inner, prefix)
            elif node.op == "call_function":
                self._call(module, node, inner, prefix)
        if not prefix:
            self.outputs = [ref.name for ref in result if isinstance(ref, Ref)]
        return result

    def _note(self, node: fx.Node, name: str) -> None:
        for mark in GraphRecorder.marks_of(node):
            self.marks[mark] = name

    def _placeholder(self, node: fx.Node) -> None:
        spec = self.specs[node.name]
        meta = _meta(node.meta.get("val"))
        target = str(spec.target or "")
        name = node.name
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            tensor = self.held[target.removeprefix("model.")]
            fqn = self.first_name[id(tensor)]
            known = self.value_of.setdefault(fqn, name)
            if known != name:  # a tie: one tensor, one value
                self.alias[name] = known
            else:
                kind = "parameter" if spec.kind is InputKind.PARAMETER else "buffer"
                self.sources[name] = Source(name, kind, fqn, meta, tensor.requires_grad)
        elif spec.kind is InputKind.USER_INPUT:
            self.sources[name] = Source(name, "input", name, meta)
        else:
            numbers = _numbers(self.exported.constants.get(target))
            self.sources[name] = Source(name, "constant", target, meta, numbers=numbers)
        self.metas[name] = meta
        self._note(node, self.alias.get(name, name))

    def _call(self, module: fx.GraphModule, node: fx.Node, inner: dict[str, Any], prefix: str) -> None:
        name = prefix + node.name
        if node.target is operator.getitem:
            base, index = node.args
            source = self._convert(base, inner, prefix)
            if source.name in self.tuples:
                picked = self.tuples[source.name][int(str(index))]
                self.alias[name] = picked.name
                self._note(node, picked.name)
                return
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            self._inline(module, node, inner, prefix)
            return
        elif str(node.target) == "autoshard.given.default":
            self._given(node, name)
            return
        elif any(part in str(node.target) for part in _ASSERTIONS):
            return
        op = self._op(node, name, inner, prefix)
        if op.target == "autoshard.opaque":
            op = replace(op, where=str(op.arguments["where"]))
        same = _no_op(op, self.metas)
        if same is not None:
            self.alias[name] = same
        else:
            self.ops.append(op)
            self.metas[name] = op.result if isinstance(op.result, Meta) else None
            self.calls_of[name] = GraphRecorder.call_of(node)
        self._note(node, self.alias.get(name, name))

    def _given(self, node: fx.Node, name: str) -> None:
        """What a module is called with by code that is not in the graph is an input of the graph."""
        meta = _meta(node.meta.get("val"))
        self.sources[name] = Source(name, "input", f"{node.args[1]}:{name}", meta)
        self.metas[name] = meta
        self._note(node, name)

    def _inline(self, module: fx.GraphModule, node: fx.Node, inner: dict[str, Any], prefix: str) -> None:
        name = prefix + node.name
        found = _body(module, node)
        assert found is not None, "first_unread finds what is not followed"
        graph, body = found
        place = list(node.args).index(graph)
        operands = [self._convert(a, inner, prefix) for a in node.args[place + 1 :]]
        names = [n.name for n in body.graph.nodes if n.op == "placeholder"]
        outer = self.no_grad
        if "set_grad_enabled" in str(node.target):
            self.no_grad = not node.args[0]
        result = self.walk(body, dict(zip(names, operands, strict=False)), f"{name}__")
        self.no_grad = outer
        self.tuples[name] = list(result) if isinstance(result, (list, tuple)) else [result]

    def _convert(self, value: Any, inner: dict[str, Any], prefix: str) -> Any:
        if isinstance(value, fx.Node):
            if value.name in inner:
                return inner[value.name]
            name = prefix + value.name
            return Ref(self.alias.get(name, name))
        if isinstance(value, (list, tuple)):
            return tuple(self._convert(item, inner, prefix) for item in value)
        if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
            return str(value)
        if isinstance(value, (torch.SymInt,)):
            return int(value)
        return value

    def _op(self, node: fx.Node, name: str, inner: dict[str, Any], prefix: str) -> Op:
        schema = getattr(node.target, "_schema", None)
        if schema is None:
            arguments = {str(i): self._convert(a, inner, prefix) for i, a in enumerate(node.args)}
            target, overload, mutates = getattr(node.target, "__name__", str(node.target)), "", ()
        else:
            arguments = {}
            for index, argument in enumerate(schema.arguments):
                given = (
                    node.args[index]
                    if index < len(node.args)
                    else node.kwargs.get(argument.name, argument.default_value)
                )
                arguments[argument.name] = self._convert(given, inner, prefix)
            target, overload = schema.name.replace("::", "."), schema.overload_name or "default"
            mutates = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
        result, site = _metas(node.meta.get("val")), GraphRecorder.site_of(node)
        return Op(name, target, overload, arguments, result, "", (), _where(node), mutates, self.no_grad, site)

    def _values(self, marks: Mapping[str, int]) -> dict[str, str]:
        return {path: self.marks[mark] for path, mark in marks.items() if self.marks.get(mark)}

    # ---- result
    def traced(self, calls: CallRecorder, paths: list[tuple[str, bool]], inputs: ExampleInputs) -> Traced:
        """Return the graph; ``paths`` says where each output sits, and whether it is state."""
        stacks: dict[int, tuple[int, ...]] = {-1: ()}
        done: list[Call] = []
        for call in calls.calls:
            parent = call["parent"]
            stacks[call["id"]] = (*stacks[-1 if parent is None else parent], call["id"])
            inputs_, outputs_ = self._values(call["inputs"]), self._values(call["outputs"])
            done.append(Call(call["id"], call["fqn"], parent, inputs_, outputs_, call["kind"]))
        ops = tuple(
            Op(**{**vars(op), "calls": stacks[self.calls_of[op.name]], "module": _module(done, self.calls_of[op.name])})
            for op in self.ops
        )
        live = {name for op in ops for name in op.refs()} | set(self.outputs)
        used = {s.fqn: s.name for s in self.sources.values() if s.kind in ("parameter", "buffer") and s.name in live}
        return Traced(
            model=type(self.model).__name__,
            sources=tuple(self.sources.values()),
            ops=ops,
            calls=tuple(done),
            outputs=tuple(Output(p, v, state) for (p, state), v in zip(paths, self.outputs, strict=True)),
            parameters=_held(self.model.named_parameters(remove_duplicate=False), used),
            buffers=_held(self.model.named_buffers(remove_duplicate=False), used),
            containers=containers_of(self.model),
            inputs=inputs,
            assumptions=inputs.assumptions,
            workload_dims={s.name: dims for s in self.sources.values() for dims in [_dims(s, inputs)] if dims},
        )


def _module(calls: list[Call], index: int) -> str:
    return calls[index].fqn if index >= 0 else ""


def _dims(source: Source, inputs: ExampleInputs) -> tuple[str | None, ...] | None:
    """Which dims of an input are the batch and the sequence."""
    if source.kind != "input" or source.meta is None:
        return None
    for path, dims in inputs.dims.items():
        last = path.split(".")[-1]
        if source.name.endswith("_" + last) and len(dims) == len(source.meta.shape):
            return dims
    return None


def _held(named: Any, used: Mapping[str, str]) -> tuple[Held, ...]:
    names: dict[int, list[str]] = {}
    tensors_by_id: dict[int, Tensor] = {}
    for fqn, tensor in named:
        names.setdefault(id(tensor), []).append(fqn)
        tensors_by_id[id(tensor)] = tensor
    return tuple(
        Held(
            fqns[0],
            tuple(fqns),
            Meta(tuple(tensors_by_id[key].shape), _dtype(tensors_by_id[key].dtype)),
            tensors_by_id[key].requires_grad,
            used.get(fqns[0]),
        )
        for key, fqns in names.items()
    )


def containers_of(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the children of every list-like container that is not inside another one."""
    found: list[tuple[str, ...]] = []
    within: set[str] = set()  # the children of those found, and all below: a module comes behind the one around it
    for fqn, module in model.named_modules():
        inside = fqn.rpartition(".")[0] in within
        if inside:
            within.add(fqn)
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and not inside:
            found.append(tuple(f"{fqn}.{name}" if fqn else name for name, _ in module.named_children()))
            within.update(found[-1])
    return tuple(found)


@dataclass(frozen=True)
class Unread:
    """A node that has no place in plain data: the module call it belongs to, the user's line, and what it is."""

    call: int
    where: str
    why: str
    depends_on_values: bool


def first_unread(module: fx.GraphModule) -> Unread | None:
    """Return the first node with a size or number that depends on values, or of an operator that is not followed."""
    for node in module.graph.nodes:
        body = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        found = first_unread(body) if isinstance(body, fx.GraphModule) else None
        if found is not None:
            return found
        why = _unread(module, node)
        if why:
            return Unread(GraphRecorder.call_of(node), _where(node), why, why == _BY_VALUES)
    return None


def _unread(module: fx.GraphModule, node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.HigherOrderOperator) and _body(module, node) is None:
        return f"the forward uses {node.target}, which autoshard does not follow"
    for value in tree_leaves(node.meta.get("val")):
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)) for size in sizes):
            return _BY_VALUES
    return ""


def _body(module: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, fx.GraphModule] | None:
    """Return the sub-graph that an operator runs, with its node."""
    for argument in node.args:
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            body = getattr(module, str(argument.target), None)
            return (argument, body) if isinstance(body, fx.GraphModule) else None
    return None


def _no_op(op: Op, metas: Mapping[str, Meta | None]) -> str | None:
    """Return the value that ``op`` hands on unchanged: torch's ``to`` returns its input where nothing differs."""
    source = op.arguments.get("self")
    if op.target != "aten.to" or not isinstance(source, Ref) or op.arguments.get("copy") is True:
        return None
    return source.name if metas.get(source.name) == op.result else None


def _numbers(value: Any) -> tuple[int, ...] | None:
    """Return a short vector of integers as such: indices written in the code."""
    if type(value) is not Tensor or value.dtype != torch.int64:  # a fake one has none
        return None
    return tuple(int(n) for n in value) if value.dim() == 1 and value.numel() <= _SHORT else None


def _meta(value: Any) -> Meta | None:
    if not isinstance(value, Tensor):
        return None
    return Meta(tuple(int(size) for size in value.shape), _dtype(value.dtype))


def _metas(value: Any) -> Meta | tuple[Meta | None, ...] | None:
    if isinstance(value, (list, tuple)):
        return tuple(_meta(item) for item in value)
    return _meta(value)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def user_places(stack: str) -> list[str]:
    """Return every ``file:line`` of a printed stack that is not torch's or ours, the innermost last."""
    frames = [frame for frame in _FRAME.findall(stack) if not frame[0].startswith(_NOT_THE_USERS)]
    return [f"{Path(file).name}:{line}" for file, line in frames]


def user_place(stack: str) -> str:
    """Return the last ``file:line`` of a printed stack that is not torch's or ours; empty where there is none."""
    return next(reversed(user_places(stack)), "")


def _where(node: fx.Node) -> str:
    """Return the last ``file:line`` of the node's stack that is not torch's or ours."""
    return user_place(node.meta.get("stack_trace") or "")
