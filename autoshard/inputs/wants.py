"""What an operator wants of the tensors it is given: integers for an embedding, an image for a convolution.

One function per family of operators, found by the operator's name; each reads nothing but the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Want:
    """What one operand must be.

    Attributes:
        tensor: the operand.
        op: the operator that asks, for messages.
        kind: ``float``, ``ids``, ``bool``, or None where any dtype does.
        dtype: the dtype that a float must have, or None.
        rank: number of dims, or None.
        sizes: elements by dim; negative dims count from the end.
        bound: integers must be below it; None where unknown.
        multiple: spatial sizes should be a multiple of it.
        exact: whether the sizes come from a parameter, so that no other input can have others.
    """

    tensor: Tensor
    op: str
    kind: str | None = None
    dtype: torch.dtype | None = None
    rank: int | None = None
    sizes: Mapping[int, int] = field(default_factory=dict)
    bound: int | None = None
    multiple: int = 1
    exact: bool = True

    def unmet(self) -> bool:
        """Whether the operand is not what is wanted."""
        dtype, shape = self.tensor.dtype, self.tensor.shape
        if self.kind == "ids" and dtype not in (torch.int64, torch.int32, torch.bool, torch.uint8):
            return True
        if self.kind == "bool" and dtype is not torch.bool:
            return True
        if self.kind == "float" and (not dtype.is_floating_point or self.dtype not in (None, dtype)):
            return True
        if self.rank is not None and len(shape) != self.rank:
            return True
        return any(not -len(shape) <= dim < len(shape) or shape[dim] != size for dim, size in self.sizes.items())


Rule = Callable[..., Iterator[Want]]
_RULES: dict[str, Rule] = {}


def wants(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Want]:
    """Return what the operator ``name`` wants of its operands; empty where no rule knows it or the call is unusual."""
    rule = _RULES.get(name)
    if rule is None:
        return []
    try:
        return [want for want in rule(*args, **kwargs) if isinstance(want.tensor, Tensor)]
    except (TypeError, IndexError, AttributeError, ValueError):
        # a call that is not shaped as the rule expects: the operator itself will say what it thinks of it
        return []


def is_consumer(name: str) -> bool:
    """Whether the operator gives its operand a meaning, so that what comes out is no longer the argument itself."""
    return name in _RULES and name not in _LAYOUT


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


_LAYOUT = ("__getitem__", "masked_fill", "masked_fill_", "where", "index_select", "gather")


def _float(tensor: Any, op: str, like: Any, sizes: Mapping[int, int], rank: int | None = None) -> Want:
    dtype = like.dtype if isinstance(like, Tensor) and like.dtype.is_floating_point else None
    exact = isinstance(like, nn.Parameter) or dtype is None
    return Want(tensor, op, "float", dtype, rank, sizes, exact=exact)


@_rule("embedding", "embedding_bag")
def _embedding(input: Any, weight: Any, *_: Any, **__: Any) -> Iterator[Want]:
    yield Want(input, "embedding", "ids", bound=weight.shape[0])


@_rule("one_hot")
def _one_hot(tensor: Any, num_classes: int = -1) -> Iterator[Want]:
    yield Want(tensor, "one_hot", "ids", bound=num_classes if num_classes > 0 else None)


@_rule("linear")
def _linear(input: Any, weight: Any, bias: Any = None) -> Iterator[Want]:
    yield _float(input, "linear", weight, {-1: weight.shape[-1]})


@_rule("bilinear")
def _bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Iterator[Want]:
    yield _float(input1, "bilinear", weight, {-1: weight.shape[1]})
    yield _float(input2, "bilinear", weight, {-1: weight.shape[2]})


@_rule("matmul", "mm", "__matmul__", "__rmatmul__", "bmm")
def _matmul(input: Any, other: Any, **_: Any) -> Iterator[Want]:
    inner = other.shape[-2] if other.ndim > 1 else other.shape[0]
    yield _float(input, "matmul", other, {-1: inner})
    yield _float(other, "matmul", input, {-2 if other.ndim > 1 else -1: input.shape[-1]})


@_rule("addmm")
def _addmm(input: Any, mat1: Any, mat2: Any, **_: Any) -> Iterator[Want]:
    yield _float(mat1, "addmm", mat2, {-1: mat2.shape[0]}, 2)


@_rule("baddbmm")
def _baddbmm(input: Any, batch1: Any, batch2: Any, **_: Any) -> Iterator[Want]:
    yield _float(batch1, "baddbmm", batch2, {0: batch2.shape[0], -1: batch2.shape[1]}, 3)


@_rule("einsum")
def _einsum(equation: Any, *operands: Any) -> Iterator[Want]:
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    terms = equation.replace(" ", "").split("->")[0].split(",")
    if "." in equation or len(terms) != len(operands):
        return
    for term, operand in zip(terms, operands, strict=True):
        if isinstance(operand, nn.Parameter):
            continue
        sizes: dict[str, int] = {}
        for other_term, other in zip(terms, operands, strict=True):
            if other is not operand and len(other_term) == other.ndim:
                sizes.update(zip(other_term, other.shape, strict=True))
        like = next((other for other in operands if isinstance(other, nn.Parameter)), None)
        found = {dim: sizes[letter] for dim, letter in enumerate(term) if letter in sizes}
        yield _float(operand, "einsum", like, found, len(term))


@_rule("conv1d", "conv2d", "conv3d")
def _conv(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Iterator[Want]:
    strides = (stride,) if isinstance(stride, int) else tuple(stride)
    patches = strides[-1] == weight.shape[-1] and strides[-1] > 1
    yield Want(
        input,
        "conv",
        "float",
        weight.dtype,
        weight.ndim,
        {1: weight.shape[1] * groups},
        multiple=strides[-1] if patches else 1,
    )


@_rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(input: Any, weight: Any, *_: Any, **__: Any) -> Iterator[Want]:
    yield _float(input, "conv", weight, {1: weight.shape[0]}, weight.ndim)


@_rule("batch_norm", "instance_norm")
def _batch_norm(input: Any, running_mean: Any, running_var: Any, weight: Any = None, *_: Any, **__: Any) -> Any:
    like = next((tensor for tensor in (weight, running_mean) if tensor is not None), None)
    if like is not None:
        yield _float(input, "batch_norm", like, {1: like.shape[0]})


@_rule("group_norm")
def _group_norm(input: Any, num_groups: int, weight: Any = None, *_: Any, **__: Any) -> Iterator[Want]:
    if weight is not None:
        yield _float(input, "group_norm", weight, {1: weight.shape[0]})


@_rule("layer_norm", "rms_norm")
def _layer_norm(input: Any, normalized_shape: Any, weight: Any = None, *_: Any, **__: Any) -> Iterator[Want]:
    sizes = {index - len(normalized_shape): int(size) for index, size in enumerate(normalized_shape)}
    yield _float(input, "norm", weight, sizes)


@_rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(input: Any, hidden: Any, weights: Any, *_: Any, **__: Any) -> Iterator[Want]:
    if isinstance(weights, (list, tuple)):
        yield _float(input, "recurrent layer", weights[0], {-1: weights[0].shape[1]}, 3)


@_rule("multi_head_attention_forward")
def _attention(
    query: Any, key: Any, value: Any, width: int, heads: int, in_weight: Any, *rest: Any, **options: Any
) -> Iterator[Want]:
    yield _float(query, "attention", in_weight, {-1: width}, 3)
    keys, values = options.get("k_proj_weight"), options.get("v_proj_weight")
    yield _float(key, "attention", keys, {-1: width if keys is None else keys.shape[1]}, 3)
    yield _float(value, "attention", values, {-1: width if values is None else values.shape[1]}, 3)


@_rule("scaled_dot_product_attention")
def _sdpa(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **__: Any) -> Iterator[Want]:
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype):
        yield Want(attn_mask, "attention", "bool")


@_rule("masked_fill", "masked_fill_")
def _masked_fill(input: Any, mask: Any, value: Any = None) -> Iterator[Want]:
    yield Want(mask, "masked_fill", "bool")


@_rule("where")
def _where(condition: Any, *_: Any, **__: Any) -> Iterator[Want]:
    yield Want(condition, "where", "bool")


@_rule("__getitem__")
def _getitem(base: Any, index: Any) -> Iterator[Want]:
    picks = index if isinstance(index, tuple) else (index,)
    dim = 0
    for pick in picks:
        if isinstance(pick, Tensor):
            yield Want(pick, "indexing", "ids", bound=base.shape[dim])
        dim += 0 if pick is None else base.ndim - len(picks) + 1 if pick is Ellipsis else 1


@_rule("index_select", "gather")
def _select(input: Any, dim: int, index: Any, **_: Any) -> Iterator[Want]:
    yield Want(index, "indexing", "ids", bound=input.shape[dim])


def reshape_wants(name: str, args: Sequence[Any]) -> list[Want]:
    """Return what a view that does not fit wants: the sizes that its operand's last dim would need.

    The leading sizes that the operand already has are left alone: of ``view(b, s, 4, 8)`` on ``(b, s, 11)``, 32 is
    wanted of the last dim.
    """
    if name not in ("view", "reshape", "unflatten", "view_as") or not args or not isinstance(args[0], Tensor):
        return []
    tensor, rest = args[0], args[1:]
    if name == "unflatten":
        dim, sizes = int(rest[0]), list(rest[1])
    else:
        dim, sizes = -1, list(rest[0]) if rest and isinstance(rest[0], (list, tuple)) else list(rest)
        if name == "view_as":
            sizes = list(rest[0].shape)
        lead = 0
        while lead < min(len(sizes), tensor.ndim - 1) and sizes[lead] == tensor.shape[lead]:
            lead += 1
        sizes = sizes[max(lead, 1 if sizes[:1] == [-1] else 0) :]
    if -1 in sizes or not all(isinstance(size, int) for size in sizes):
        return []
    product = int(torch.Size(sizes).numel())
    return [Want(tensor, name, sizes={dim: product}, exact=True)] if product > 1 else []


def broadcast_wants(name: str, tensors: Sequence[Tensor]) -> list[Want]:
    """Return what would make the operands of a failed elementwise operator fit each other, right-aligned."""
    found = []
    for tensor in tensors:
        for other in tensors:
            if other is tensor:
                continue
            if tensor.ndim > other.ndim >= 3:
                found.append(Want(tensor, name, rank=other.ndim, exact=False))
            sizes = {
                -dim: other.shape[-dim]
                for dim in range(1, min(tensor.ndim, other.ndim) + 1)
                if tensor.shape[-dim] != other.shape[-dim] and 1 not in (tensor.shape[-dim], other.shape[-dim])
            }
            if sizes:
                found.append(Want(tensor, name, sizes=sizes, exact=isinstance(other, nn.Parameter)))
    return found


def joined_wants(name: str, args: Sequence[Any]) -> list[Want]:
    """Return what would make tensors fit that are concatenated or stacked."""
    if name not in ("cat", "concat", "stack", "hstack", "vstack") or not args or not isinstance(args[0], (list, tuple)):
        return []
    tensors = [tensor for tensor in args[0] if isinstance(tensor, Tensor)]
    along = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
    found = []
    for tensor in tensors:
        for other in tensors:
            if other is tensor or name in ("hstack", "vstack"):
                continue
            if tensor.ndim != other.ndim:
                found.append(Want(tensor, name, rank=other.ndim, exact=False))
                continue
            skip = along % tensor.ndim if name != "stack" and tensor.ndim else -1
            sizes = {
                dim: other.shape[dim]
                for dim in range(tensor.ndim)
                if dim != skip and tensor.shape[dim] != other.shape[dim]
            }
            if sizes:
                found.append(Want(tensor, name, sizes=sizes, exact=isinstance(other, nn.Parameter)))
    return found
