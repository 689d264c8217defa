"""Refine and unify factors: say that two extents are one, take slices, regroup dims.

Refining a leaf into a product or a concatenation refines every dim that shares it. What can't be matched is blocked,
with the reason that the caller gives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from autoshard.passes.factors import Block, Factor, Kind, block, concatenation, find, flat, leaves, parts, product


def split_leaf(leaf: Factor, major: int) -> tuple[Factor, Factor]:
    """Refine a leaf into ``major`` x the rest, in every dim that shares it."""
    first, second = Factor(major), Factor(leaf.size // major)
    _refine(leaf, "product", [first, second])
    return first, second


def _refine(leaf: Factor, kind: Kind, children: Sequence[Factor]) -> None:
    for child in children:
        for reason in leaf.blocks:
            block(child, reason)
    leaf.kind, leaf.children = kind, list(children)


def unify(a: Factor, b: Factor, reason: Block) -> None:
    """Say that two extents are the same one. What cannot be matched is blocked with ``reason``."""
    a, b = find(a), find(b)
    if a is b or (a.size <= 1 and b.size <= 1):
        return
    if a.size != b.size:
        _give_up(a, b, reason, "different extents")
    elif a.kind == "leaf" or b.kind == "leaf":
        _join(*((a, b) if a.kind == "leaf" else (b, a)), reason)
    elif a.kind == b.kind == "concatenation":
        _align_parts(a, b, reason)
    elif a.kind == b.kind == "product":
        _align_factors(flat(a), flat(b), reason)
    else:
        _product_and_parts(*((a, b) if a.kind == "product" else (b, a)), reason)


def _join(leaf: Factor, other: Factor, reason: Block) -> None:
    if other.kind != "leaf" and any(inner is leaf for inner in leaves(other)):
        _give_up(leaf, other, reason, "an extent inside itself")
        return
    for known in leaf.blocks:
        block(other, known)
    leaf.into = other


def _give_up(a: Factor, b: Factor, reason: Block, what: str) -> None:
    why = Block(f"{reason.why}: {what}", reason.op, reason.where)
    block(a, why)
    block(b, why)


def _align_parts(a: Factor, b: Factor, reason: Block) -> None:
    """Match two concatenations from the left, splitting leaves where parts end at different places."""
    left, right = parts(a), parts(b)
    while left and right:
        x, y = find(left[0]), find(right[0])
        if x.size == y.size:
            unify(x, y, reason)
            left.pop(0), right.pop(0)
            continue
        if x.size < y.size:
            left, right, x, y = right, left, y, x
        if x.kind == "leaf":
            head, tail = Factor(y.size), Factor(x.size - y.size)
            _refine(x, "concatenation", [head, tail])
            left[0:1] = [head, tail]
        elif x.kind == "concatenation":
            left[0:1] = parts(x)
        else:
            _give_up(a, b, reason, "parts that end inside each other")
            return


def _align_factors(a: list[Factor], b: list[Factor], reason: Block) -> None:
    """Match two products from the major end, splitting leaves where one factor covers several."""
    left, right = list(a), list(b)
    while left and right:
        x, y = find(left[0]), find(right[0])
        if x.kind == "product":
            left[0:1] = flat(x)
        elif y.kind == "product":
            right[0:1] = flat(y)
        elif x.size == y.size:
            unify(x, y, reason)
            left.pop(0), right.pop(0)
        else:
            if x.size < y.size:
                left, right, x, y = right, left, y, x
            if x.kind == "leaf" and x.size % y.size == 0:
                left[0:1] = split_leaf(x, y.size)
                continue
            common = math.gcd(x.size, y.size)
            if x.kind == y.kind == "leaf" and common > 1 and common != y.size:
                left[0:1] = split_leaf(x, common)
                right[0:1] = split_leaf(y, common)
                continue
            for rest in left + right:
                block(rest, Block(f"{reason.why}: factors that do not align", reason.op, reason.where))
            return


def _product_and_parts(whole: Factor, cat: Factor, reason: Block) -> None:
    """Match a product with a concatenation: n equal parts, or parts that share a minor factor."""
    factors, pieces = flat(whole), parts(cat)
    if factors[0].size == len(pieces) and len({p.size for p in pieces}) == 1:
        block(factors[0], Block("it numbers the parts of a fused projection", reason.op, reason.where))
        rest = product(factors[1:])
        for piece in pieces:
            unify(piece, rest, reason)
        return
    minor = factors[-1]
    if len(factors) > 1 and all(p.size % minor.size == 0 for p in pieces):
        heads = [_strip_minor(p, minor, reason) for p in pieces]
        if all(h is not None for h in heads):
            unify(product(factors[:-1]), concatenation([h for h in heads if h is not None]), reason)
            return
    _give_up(whole, cat, reason, "a product against a concatenation")


def _strip_minor(piece: Factor, minor: Factor, reason: Block) -> Factor | None:
    """Return ``piece`` without its minor factor, which is unified with ``minor``; None where it has none."""
    piece = find(piece)
    if piece.size == minor.size:
        unify(piece, minor, reason)
        return Factor(1)
    if piece.kind == "leaf":
        head, tail = split_leaf(piece, piece.size // minor.size)
        unify(tail, minor, reason)
        return head
    factors = flat(piece)
    if len(factors) > 1 and factors[-1].size == minor.size:
        unify(factors[-1], minor, reason)
        return product(flat(piece)[:-1])
    return None


def take(factor: Factor, start: int, end: int, reason: Block) -> Factor:
    """Return the factor of a slice ``[start, end)`` of an extent, refined into parts; block what can't be sliced."""
    factor = find(factor)
    if start <= 0 and end >= factor.size:
        return factor
    if start >= end:
        return Factor(0)
    if factor.kind == "product":
        factors = flat(factor)
        below = factor.size // factors[0].size
        if start % below == 0 and end % below == 0:
            return product([take(factors[0], start // below, end // below, reason), *factors[1:]])
        return _fresh(factor, end - start, reason)
    if factor.kind == "leaf":
        sizes = [s for s in (start, end - start, factor.size - end) if s]
        _refine(factor, "concatenation", [Factor(s) for s in sizes])
    return _take_parts(factor, start, end, reason)


def _take_parts(cat: Factor, start: int, end: int, reason: Block) -> Factor:
    picked: list[Factor] = []
    offset = 0
    for piece in parts(cat):
        low, high = max(start, offset), min(end, offset + piece.size)
        if low < high:
            if low == offset and high == offset + piece.size:
                picked.append(piece)
            else:
                picked.append(take(piece, low - offset, high - offset, reason))
        offset += piece.size
    return concatenation(picked)


def _fresh(factor: Factor, size: int, reason: Block) -> Factor:
    why = Block(f"{reason.why}: a slice across factors", reason.op, reason.where)
    block(factor, why)
    fresh = Factor(size)
    block(fresh, why)
    return fresh


def reshape(dims: Sequence[Factor], shape: Sequence[int], reason: Block) -> list[Factor]:
    """Return the dims of a tensor viewed as ``shape``; a group of dims that does not factor is blocked, alone."""
    if 0 in shape:  # nothing in it: any dim of 0 would pair with all the others
        out = [Factor(size) for size in shape]
        for dim in (*dims, *out):
            block(dim, reason)
        return out
    out = []
    for source, target in _groups([d.size for d in dims], list(shape)):
        ins, sizes = [dims[i] for i in source], [shape[i] for i in target]
        made = _regroup(ins, sizes, reason)
        if made is None:
            for dim in ins:
                block(dim, reason)
            made = [Factor(size) for size in sizes]
            for dim in made:
                block(dim, reason)
        out += made
    return out


def _groups(a: list[int], b: list[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Pair the smallest runs of dims of two shapes that hold the same number of elements."""
    i = j = 0
    while i < len(a) or j < len(b):
        left, right = [], []
        x = y = 1
        if i < len(a):
            x, left, i = a[i], [i], i + 1
        if j < len(b):
            y, right, j = b[j], [j], j + 1
        while x != y:
            if (x < y or y == 0) and i < len(a):
                x, left, i = x * a[i], [*left, i], i + 1
            elif j < len(b):
                y, right, j = y * b[j], [*right, j], j + 1
            else:
                break
        yield left, right


def _regroup(dims: Sequence[Factor], sizes: Sequence[int], reason: Block) -> list[Factor] | None:
    stack = [f for dim in dims for f in flat(dim) if f.size != 1]
    out: list[Factor] = []
    for size in sizes:
        have: list[Factor] = []
        got = 1
        while got < size:
            if not stack:
                return None
            top = find(stack[0])
            if top.kind == "product":
                stack[0:1] = flat(top)
            elif size % (got * top.size) == 0:
                have.append(top)
                got *= top.size
                stack.pop(0)
            else:
                opened = _open(top, size // got, reason) if size % got == 0 else None
                if opened is None:
                    return None
                stack[0:1] = opened
        out.append(product(have))
    return out


def _open(factor: Factor, major: int, reason: Block) -> list[Factor] | None:
    """Refine a factor into ``major`` x the rest."""
    if factor.size % major:
        return None
    if factor.kind == "leaf":
        return list(split_leaf(factor, major))
    pieces, rest = parts(factor), factor.size // major
    if len(pieces) == major and len({p.size for p in pieces}) == 1:
        for piece in pieces[1:]:
            unify(pieces[0], piece, reason)
        numbers = Factor(major)
        block(numbers, Block("it numbers the parts of a fused projection", reason.op, reason.where))
        return [numbers, pieces[0]]
    if any(p.size % rest for p in pieces):
        return None
    minor = Factor(rest)
    heads = [_strip_minor(p, minor, reason) for p in pieces]
    if any(h is None for h in heads):
        return None
    return [concatenation([h for h in heads if h is not None]), minor]
