"""Change a guess so that it is what an operator wanted of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from math import isqrt

import torch

from autoshard.inputs.guess import BATCH, SEQUENCE, Dim, Facts, Guess
from autoshard.inputs.probe import Wish


@dataclass(frozen=True)
class Grant:
    """One way to fulfil a wish.

    Attributes:
        guess: the argument's new guess.
        cost: 0 where the wish leaves no choice, more for what is less likely.
        sequence: the size that every sequence dim gets instead, or None.
    """

    guess: Guess
    cost: int = 0
    sequence: int | None = None


def grants(wish: Wish, guess: Guess, facts: Facts) -> list[Grant]:
    """Return the ways to fulfil ``wish``, the likeliest first; empty where the argument has no say in it."""
    if guess.kind == "value":
        return []
    want = wish.want
    if want.bound is not None and guess.kind == "ids" and want.bound < guess.bound:
        return [Grant(dataclasses.replace(guess, bound=want.bound))]
    if want.kind is not None and want.tensor.dtype == guess.dtype:
        found = _other_kind(wish, guess, facts)
        if found:
            return found
    if want.rank is not None and len(wish.shape) != want.rank:
        return _other_rank(wish, guess, facts)
    found = []
    for dim, size in want.sizes.items():
        index = dim % len(wish.shape) if wish.shape else 0
        if not wish.shape or wish.shape[index] == size:
            continue
        found += _other_size(wish, index, size, guess, facts)
    return found


def at_rank(guess: Guess, rank: int, facts: Facts) -> Guess:
    """Return the usual guess of the same kind with another number of dims."""
    kind = guess.kind if guess.kind != "ids" or rank <= 2 else "float"
    return dataclasses.replace(guess, dims=facts.dims(kind, rank))


def with_sides(guess: Guess, side: int) -> Guess:
    """Return the guess with other image sides."""
    dims = tuple(dataclasses.replace(dim, size=side) if dim.kind == "side" else dim for dim in guess.dims)
    return dataclasses.replace(guess, dims=dims)


def _other_kind(wish: Wish, guess: Guess, facts: Facts) -> list[Grant]:
    want, rank = wish.want, len(guess.dims)
    dtype = want.tensor.dtype
    if want.kind == "ids" and dtype.is_floating_point:
        ranks = [min(rank, 2), 1, rank] if len(wish.shape) == rank else [rank, 2, 1]
        return [Grant(_ids(each, want.bound, facts), cost) for cost, each in enumerate(dict.fromkeys(ranks))]
    if want.kind == "bool" and dtype is not torch.bool:
        same = dataclasses.replace(guess, kind="ones", dtype=torch.bool)
        ones = [facts.ones(each, torch.bool) for each in (2, 4, 3)]
        return [Grant(same)] if guess.kind != "float" else [Grant(each, cost) for cost, each in enumerate(ones)]
    if want.kind == "float" and not dtype.is_floating_point:
        first = rank + 1 if guess.kind == "ids" and rank == 2 and want.rank is None else want.rank or rank
        ranks = list(dict.fromkeys((first, rank, 3)))
        floats = [dataclasses.replace(facts.floats(each), dtype=want.dtype or facts.dtype) for each in ranks]
        return [Grant(each, cost) for cost, each in enumerate(floats)]
    if want.kind == "float" and want.dtype not in (None, dtype):
        return [Grant(dataclasses.replace(guess, dtype=want.dtype or dtype))]
    return []


def _ids(rank: int, bound: int | None, facts: Facts) -> Guess:
    return facts.ids(rank, bound)


def _other_rank(wish: Wish, guess: Guess, facts: Facts) -> list[Grant]:
    rank = len(guess.dims) + (wish.want.rank or 0) - len(wish.shape)
    if rank < 0:
        return []
    changed = at_rank(guess, rank, facts)
    if wish.want.op == "conv" and rank == 3:
        dims = (Dim(BATCH, facts.batch), Dim("channel", facts.placeholder(0)), Dim(SEQUENCE, facts.sequence))
        changed = dataclasses.replace(guess, dims=dims)
    cost = 0 if wish.direct else 1
    if rank != len(guess.dims) - 1 or wish.want.kind is not None:
        return [Grant(changed, cost)]
    # among operands of the same kind, the one with a dim too many has no batch
    return [Grant(dataclasses.replace(guess, dims=guess.dims[1:]), cost), Grant(changed, cost + 1)]


def _other_size(wish: Wish, index: int, size: int, guess: Guess, facts: Facts) -> list[Grant]:
    """Return the ways to give the operand ``size`` elements in dim ``index``."""
    places = _places(wish, index, guess)
    found = [grant for place in places for grant in _resized(wish, place, size, guess, facts)]
    if not places or all(guess.dims[place].fixed for place in places):
        found += _image_tokens(wish.shape[index], size, guess)
        found += _in_proportion(wish.shape[index], size, guess)
    if not places:
        found += _unflattened(wish.shape[index], size, guess, facts)
    return found


def _places(wish: Wish, index: int, guess: Guess) -> list[int]:
    """Return the argument's dims that the operand's dim may be, recognised by size, the likeliest first."""
    size = wish.shape[index]
    places = [place for place, dim in enumerate(guess.dims) if dim.size == size]
    same_rank = len(wish.shape) == len(guess.dims)
    from_end = index - len(wish.shape) + len(guess.dims)
    return sorted(
        places, key=lambda place: (guess.dims[place].fixed, place != index or not same_rank, place != from_end)
    )


def _resized(wish: Wish, place: int, size: int, guess: Guess, facts: Facts) -> list[Grant]:
    dim = guess.dims[place]
    want = wish.want
    late = 2 if dim.fixed else 0
    if dim.kind == "side" and want.exact and wish.direct and want.op != "conv":
        flat = dataclasses.replace(guess, dims=facts.dims("float", 3))
        return [Grant(flat.with_dim(2, Dim("width", size, True)), late), Grant(with_sides(guess, size), late + 1)]
    if dim.kind == "side":
        return [Grant(with_sides(guess, size), late)]
    if want.op == "conv":
        return [Grant(_convolved(guess, place, size, want.multiple, facts), late)]
    kept = Grant(guess.with_dim(place, Dim("width", size, True)), late)
    without = dataclasses.replace(guess, dims=guess.dims[:place] + guess.dims[place + 1 :])
    if guess.kind == "ones" and dim.role is not None:
        return [Grant(facts.ones(rank, guess.dtype), rank != 4) for rank in (4, 3, 2) if rank != len(guess.dims)]
    if dim.kind == BATCH:
        return [
            Grant(without, 1),
            Grant(guess.with_dim(place, Dim("width", 1, True)), 2),
            dataclasses.replace(kept, cost=3),
        ]
    if dim.kind != SEQUENCE:
        return [kept]
    if want.op == "batch_norm":
        return [Grant(without), dataclasses.replace(kept, cost=2)]
    own = Grant(guess.with_dim(place, Dim("length", size, True)), 0 if want.exact else 2)
    everywhere = Grant(guess, 2 if size in (1, facts.batch) else 1, sequence=size)
    return [own, Grant(without, 1)] if want.exact else [everywhere, own, Grant(without, 1)]


def _convolved(guess: Guess, place: int, channels: int, multiple: int, facts: Facts) -> Guess:
    """Return the guess with ``channels`` in one dim, a sequence where there was none, and sides that patches fit."""
    dims = list(guess.dims)
    took_sequence = dims[place].kind == SEQUENCE
    dims[place] = Dim("channel", channels, True)
    for index, dim in enumerate(dims):
        if took_sequence and dim.kind == "width" and not dim.fixed:
            dims[index] = Dim(SEQUENCE, facts.sequence)
            took_sequence = False
        elif dim.kind == "side" and dim.size % multiple:
            dims[index] = Dim("side", 4 * multiple)
    return dataclasses.replace(guess, dims=tuple(dims))


def _image_tokens(have: int, need: int, guess: Guess) -> list[Grant]:
    """Return the image side for ``need`` patches, if ``have`` is a square of patches plus a few extra tokens."""
    side = next((dim.size for dim in guess.dims if dim.kind == "side"), 0)
    for extra in range(6):
        now, then = isqrt(max(have - extra, 0)), isqrt(max(need - extra, 0))
        squares = now * now == have - extra and then * then == need - extra
        if side and now and then and squares and side * then % now == 0:
            return [Grant(with_sides(guess, side * then // now))]
    return []


def _in_proportion(have: int, need: int, guess: Guess) -> list[Grant]:
    """Return the guess with one free dim changed, for where ``have`` grows with that dim, as a sum or a product."""
    found = []
    for place, dim in enumerate(guess.dims):
        if dim.kind in ("width", "length") and not dim.fixed and have:
            sizes = (dim.size + need - have, dim.size * need // have, -(-dim.size * need // have))
            useful = [size for size in dict.fromkeys(sizes) if size > 0 and size != dim.size]
            found += [Grant(guess.with_dim(place, Dim(dim.kind, size)), 1) for size in useful]
    return found


def _unflattened(have: int, need: int, guess: Guess, facts: Facts) -> list[Grant]:
    """Return what flattens to ``need`` features: features as they are, or an image."""
    shape = guess.shape
    runs = [start for start in range(1, len(shape)) if torch.Size(shape[start:]).numel() == have]
    if not runs and torch.Size(shape).numel() != have:
        return []
    if len(shape) == 3 and need % shape[1] == 0 and guess.dims[2].fixed is False and not runs:
        return [Grant(guess.with_dim(2, Dim("width", need // shape[1], True)), 1)]
    flat = Grant(dataclasses.replace(guess, dims=(Dim(BATCH, facts.batch), Dim("width", need, True))), 0)
    images = []
    for channels in dict.fromkeys((facts.channels, 1, 3)):
        side = isqrt(need // channels)
        if need % channels == 0 and side * side * channels == need and side > 1:
            sides = (Dim("side", side, True), Dim("side", side, True))
            dims = (Dim(BATCH, facts.batch), Dim("channel", channels, True), *sides)
            images.append(Grant(dataclasses.replace(guess, dims=dims), 1))
    return [*images, flat] if len(shape) == 4 else [flat, *images]
