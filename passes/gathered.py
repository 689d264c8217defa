"""Cuts that are undone right behind the matmul that makes them: a lone matrix's rows, or the columns of a table.

Nothing else need be cut for it, and what its values are made of does not matter: each rank computes its share of the
result's last (or channel) dim, and the shares are laid side by side at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.ir import Meta, Op, Ref
from autoshard.passes.factors import Factor, leaves
from autoshard.passes.occurrence import Division, Occurrences


@dataclass(frozen=True)
class Role:
    """Where an op takes a matrix, and what becomes of its rows.

    Attributes:
        weight: the argument's name.
        rows: the dim of it that the result has.
        result: that dim in the result, from the end.
        bias: the argument that is added along it, or None.
    """

    weight: str
    rows: int
    result: int
    bias: str | None = None


ROLES = {
    "aten.linear": Role("weight", 0, -1, "bias"),
    "aten.addmm": Role("mat2", 1, -1, "self"),
    "aten.mm": Role("mat2", 1, -1),
    "aten.matmul": Role("other", 1, -1),
    "aten.conv1d": Role("weight", 0, -2, "bias"),
    "aten.conv2d": Role("weight", 0, -3, "bias"),
    "aten.conv3d": Role("weight", 0, -4, "bias"),
    "aten.embedding": Role("weight", 1, -1),
}


#: Ops on each element alone that draw nothing: what is cut goes through them as what is whole.
ELEMENTWISE = frozenset(
    f"aten.{name}" for name in "add sub mul div neg abs exp tanh sigmoid relu gelu silu to _to_copy float".split()
)


@dataclass(frozen=True)
class Gather:
    """One matrix, and the vectors beside it, that are cut for their own matmuls only.

    Attributes:
        rows: how many there are.
        divisions: how each tensor is divided, by name.
        dims: the dim that is cut, by value: of the tensors, and of each result from the front.
        ends: the values that are made whole.
    """

    rows: int
    divisions: dict[str, Division]
    dims: dict[str, int]
    ends: frozenset[str]


def gathers(index: Occurrences, degree: int) -> Iterator[Gather]:
    """Yield every matrix that can be cut so, if its rows divide; a matrix of several roles is left out."""
    seen: set[tuple[str, Role]] = set()
    for op in index.factored.traced.ops:
        role = ROLES.get(op.target)
        weight = op.arguments.get(role.weight) if role else None
        if role is None or not isinstance(weight, Ref) or weight.name not in index.by_value:
            continue
        if (weight.name, role) in seen:
            continue
        seen.add((weight.name, role))
        made = _gather(index, weight.name, role, degree)
        if made is not None:
            yield made


def _gather(index: Occurrences, weight: str, role: Role, degree: int) -> Gather | None:
    shape = index.by_value[weight].meta.shape
    if len(shape) < 2 or shape[role.rows] < 2:
        return None
    tensors = {weight: role.rows}
    dims = {weight: role.rows}
    for user in index.users[weight]:
        if ROLES.get(user.target) == role and user.arguments.get(role.weight) == Ref(weight) and _plain(user):
            dims[user.name] = role.result % len(index.factored.single(user.name))
            bias = user.arguments.get(role.bias) if role.bias else None
            if isinstance(bias, Ref):
                if bias.name not in index.by_value or len(index.by_value[bias.name].meta.shape) != 1:
                    return None
                tensors[bias.name] = dims[bias.name] = 0
        elif not (role.rows == 0 and any(index.looks_up(user, leaf) for leaf in _leaves(index, weight, 0))):
            return None
    for value in tensors:
        if value != weight and any(user.name not in dims for user in index.users[value]):
            return None
    results = [name for name in dims if name in index.ops and dims[name] is not None and name not in tensors]
    ends = frozenset(_follow(index, name, dims, tensors) for name in results)
    divisions = {
        index.by_value[value].fqn: Division(dim, ((0, index.by_value[value].meta.shape[dim], degree),), degree)
        for value, dim in tensors.items()
    }
    return Gather(shape[role.rows], divisions, dims, ends)


def _follow(index: Occurrences, value: str, dims: dict[str, int], tensors: dict[str, int]) -> str:
    """Let a result stay cut through ops on each element alone, in the same code, as far as such take vectors beside it.

    Notes what is cut on the way in ``dims`` and ``tensors``; returns what is made whole at last.
    """
    end, found, vectors = value, {}, {}
    while True:
        users = index.users[value]
        user = users[0] if len(users) == 1 else None
        made = index.ops[value]
        if user is None or user.target not in ELEMENTWISE or user.calls != made.calls or value in index.returned:
            return end
        shape = made.result.shape if isinstance(made.result, Meta) else ()
        if not isinstance(user.result, Meta) or user.result.shape != shape or dims[end] != len(shape) - 1:
            return end
        beside = [_vector(index, name, shape[-1], user) for name in user.refs() if name != value]
        if user.refs().count(value) != 1 or any(one is None for one in beside):
            return end
        value = user.name
        found[value] = len(shape) - 1
        for one in beside:
            vectors.update(one or {})
        if beside:
            end = value
            dims.update(found | dict.fromkeys(vectors, 0))
            tensors.update({name: 0 for name in vectors if name in index.by_value})


def _vector(index: Occurrences, value: str, size: int, user: Op) -> dict[str, int] | None:
    """Return the values that a vector beside a result is made of, all of them for ``user`` only; None for others."""
    meta = index.metas.get(value)
    if meta is None or meta.shape != (size,) or index.users[value] != [user]:
        return None
    if value in index.by_value:
        return {value: 0}
    made = index.ops.get(value)
    if made is None or made.target not in ELEMENTWISE or len(made.refs()) != 1:
        return None
    inner = _vector(index, made.refs()[0], size, made)
    return None if inner is None else {value: 0, **inner}


def _plain(op: Op) -> bool:
    """Whether rows of the matrix are independent: not those of a convolution in groups."""
    return bool(op.arguments.get("groups", 1) == 1)


def _leaves(index: Occurrences, value: str, dim: int) -> list[Factor]:
    return list(leaves(index.factored.single(value)[dim]))
