"""Which arguments of torch's calls are sizes of what they return, or numbers that count it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

#: Calls that are told a count: its argument's name, and its place.
_COUNTS = {
    **dict.fromkeys(["conv1d", "conv2d", "conv3d"], ("groups", 6)),
    **dict.fromkeys(["conv_transpose1d", "conv_transpose2d", "conv_transpose3d"], ("groups", 6)),
    "group_norm": ("num_groups", 1),
}
_SHAPED = frozenset(["view", "reshape", "expand", "broadcast_to"])
_SPLIT = frozenset(["split", "split_with_sizes"])
_MADE = frozenset(["zeros", "ones", "empty", "full", "rand", "randn"])
_NEW = frozenset(["new_zeros", "new_ones", "new_empty", "new_full"])


@dataclass(frozen=True, eq=False)
class SizeArgument:
    """A number that a call is given.

    Attributes:
        value: the number, an integer or what acts as one.
        tensor: the result it shapes.
        dim: which dim of that; the name of an argument where it is a count that the op is told.
        path: where it is among the arguments: a place or a name, then ``(item, items)`` in a sequence.
        times: what it is multiplied with to be the size, where it is how often a dim is repeated.
    """

    value: Any
    tensor: Tensor
    dim: int | str
    path: tuple[Any, ...]
    times: tuple[Tensor, int] | None = None


def size_arguments(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Iterator[SizeArgument]:
    """Yield the sizes and counts that the call ``name`` of torch was given; nothing for most calls."""
    if name in _SPLIT:
        yield from _split(args, kwargs, result)
    elif not isinstance(result, Tensor):
        return
    elif name in _COUNTS:
        argument, place = _COUNTS[name]
        found = _argument(args, kwargs, place, argument)
        yield from (SizeArgument(value, result, argument, path) for value, path in found)
    elif name in _SHAPED:
        yield from _numbered(result, 0, _argument(args, kwargs, 1, "size", "shape", many=True))
    elif name == "unflatten":
        (dim, _), *_ = [*_argument(args, kwargs, 1, "dim"), (0, ())]
        sizes = list(_argument(args, kwargs, 2, "sizes", many=True))
        yield from _numbered(result, int(dim) % (result.dim() - len(sizes) + 1), sizes)
    elif name in _MADE or name in _NEW:
        sizes = list(_argument(args, kwargs, int(name in _NEW), "size", many=name not in ("full", "new_full")))
        yield from _numbered(result, 0, sizes[: result.dim()])
    elif name == "layer_norm":
        sizes = list(_argument(args, kwargs, 1, "normalized_shape"))
        yield from _numbered(result, result.dim() - len(sizes), sizes)
    elif name == "repeat":
        sizes = list(_argument(args, kwargs, 1, "repeats", "sizes", many=True))
        new = result.dim() - args[0].dim()
        for one in _numbered(result, 0, sizes):
            yield replace(one, times=(args[0], int(one.dim) - new)) if int(one.dim) >= new else one
    elif name == "__getitem__":
        yield from _slice(args[1], result)


Found = tuple[Any, tuple[Any, ...]]


def _argument(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], place: int, *names: str, many: bool = False
) -> Iterator[Found]:
    """Yield the numbers of an argument with their paths: one, a sequence's, or with ``many`` all from ``place`` on."""
    name = next((n for n in names if n in kwargs), None)
    if name is not None:
        yield from _items(kwargs[name], (name,))
    elif len(args) > place and many and not isinstance(args[place], (list, tuple)):
        yield from ((value, (i,)) for i, value in enumerate(args) if i >= place)
    elif len(args) > place:
        yield from _items(args[place], (place,))


def _items(value: Any, path: tuple[Any, ...]) -> Iterator[Found]:
    if isinstance(value, (list, tuple)):
        yield from ((item, (*path, i, len(value))) for i, item in enumerate(value))
    else:
        yield value, path


def _numbered(result: Tensor, first: int, sizes: Any) -> Iterator[SizeArgument]:
    yield from (SizeArgument(value, result, first + i, path) for i, (value, path) in enumerate(sizes))


def _split(args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Iterator[SizeArgument]:
    (dim, _), *_ = [*_argument(args, kwargs, 2, "dim"), (0, ())]
    sizes = _argument(args, kwargs, 1, "split_size_or_sections", "split_size", "split_sizes")
    for (value, path), piece in zip(sizes, result, strict=False):
        yield SizeArgument(value, piece, int(dim) % piece.dim(), path)


def _slice(index: Any, result: Tensor) -> Iterator[SizeArgument]:
    """Yield the bounds of a subscript's only slice: with several, which op is whose is not known."""
    slices = [one for one in (index if isinstance(index, tuple) else (index,)) if isinstance(one, slice)]
    bounded = [one for one in slices if (one.start, one.stop) != (None, None)]
    if len(bounded) == 1 and bounded[0].step in (None, 1):
        for argument, value in (("start", bounded[0].start), ("end", bounded[0].stop)):
            if value is not None:
                yield SizeArgument(value, result, argument, (argument,))
