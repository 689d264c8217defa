"""Ops that contract: linear, matrix products, einsum, lookups in a table."""

from __future__ import annotations

from autoshard.ir import Meta, Op, Ref, references
from autoshard.passes.factors import Factor
from autoshard.passes.rules.shape import unsupported
from autoshard.passes.rules.walk import Dims, Result, Rule, Walk, shape_of


def contract(op: Op, walk: Walk, factor: Factor) -> None:
    """Record a contraction with a weight; one of two activations would cost a sum of all scores: it is blocked."""
    if any(name in walk.weights for name in references(op.arguments)):
        walk.contract(factor, "matmul")
    else:
        walk.block(factor, "a product of two activations sums over it")


def linear(op: Op, walk: Walk) -> Result:
    """``(..., i) x (o, i) -> (..., o)``."""
    x, weight, bias = (walk.dims(op.arguments.get(name)) for name in ("input", "weight", "bias"))
    walk.unify(x[-1], weight[-1])
    contract(op, walk, weight[-1])
    if len(weight) == 1:
        return x[:-1]
    if bias:
        walk.unify(bias[0], weight[0])
    return [*x[:-1], weight[0]]


def addmm(op: Op, walk: Walk) -> Result:
    """``bias + (n, i) x (i, o)``, and its batched form."""
    batched = op.target == "aten.baddbmm"
    bias = walk.dims(op.arguments.get("self"))
    a = walk.dims(op.arguments.get("batch1" if batched else "mat1"))
    b = walk.dims(op.arguments.get("batch2" if batched else "mat2"))
    walk.unify(a[-1], b[-2])
    if batched:
        walk.unify(a[0], b[0])
    contract(op, walk, b[-2])
    return walk.broadcast(shape_of(op), [[*a[:-1], b[-1]], bias])


def matmul(op: Op, walk: Walk) -> Result:
    """``(..., n, i) x (..., i, o)``, either side possibly a vector."""
    first, second = (walk.dims(Ref(name)) for name in references(op.arguments)[:2])
    a: Dims = first if len(first) > 1 else [Factor(1), *first]
    b: Dims = second if len(second) > 1 else [*second, Factor(1)]
    walk.unify(a[-1], b[-2])
    contract(op, walk, b[-2])
    shape = shape_of(op)
    own = (len(first) > 1) + (len(second) > 1)
    lead = walk.broadcast(shape[: len(shape) - own], [a[:-2], b[:-2]])
    return lead + ([a[-2]] if len(first) > 1 else []) + ([b[-1]] if len(second) > 1 else [])


def einsum(op: Op, walk: Walk) -> Result:
    """Dims with one letter are one factor; letters missing from the result are contracted."""
    operands = [walk.dims(Ref(name)) for name in references(op.arguments.get("tensors"))]
    terms, result = _letters(str(op.arguments["equation"]), operands, len(shape_of(op)))
    known: dict[str, Factor] = {}
    for term, dims in zip(terms, operands, strict=True):
        for letter, dim in zip(term, dims, strict=True):
            if letter not in known or known[letter].size == 1:
                known[letter] = dim
            elif dim.size != 1:
                walk.unify(known[letter], dim)
    for letter, factor in known.items():
        if letter not in result:
            contract(op, walk, factor)
    return [known[letter] for letter in result]


def _letters(equation: str, operands: list[Dims], rank: int) -> tuple[list[str], str]:
    """Write every dim of an einsum equation as one letter: ``...`` becomes digits, a missing result is filled in."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        once = sorted(c for c in set(left) if c.isalpha() and left.count(c) == 1)
        right = ("..." if "..." in left else "") + "".join(once)
    wide = max(
        (len(d) - len(t.replace("...", "")) for t, d in zip(terms, operands, strict=True) if "..." in t), default=0
    )
    digits = "0123456789"[:wide]
    filled = []
    for term, dims in zip(terms, operands, strict=True):
        own = len(dims) - len(term.replace("...", ""))
        filled.append(term.replace("...", digits[wide - own :] if own else ""))
    return filled, right.replace(
        "...", digits[wide - (rank - len(right.replace("...", ""))) :] if "..." in right else ""
    )


def embedding(op: Op, walk: Walk) -> Result:
    """Rows of a table picked by number: cutting the rows leaves a partial sum."""
    table, rows = walk.dims(op.arguments.get("weight")), walk.dims(op.arguments.get("indices"))
    walk.contract(table[0], "lookup")
    return [*rows, table[1]]


def bag(op: Op, walk: Walk) -> Result:
    """Rows of a table picked by number and reduced in bags: each column alone."""
    why = "bags of rows are picked by number"
    table = walk.dims(op.arguments["weight"])
    walk.block(table[0], why)
    for name in ("indices", "offsets", "per_sample_weights"):
        walk.blocked(walk.dims(op.arguments.get(name)), why)
    first, *others = [walk.blocked(walk.fresh(meta), why) for meta in _results(op)]
    return [[first[0], table[1]], *others]


def _results(op: Op) -> tuple[Meta | None, ...]:
    return op.result if isinstance(op.result, tuple) else (op.result,)


def outer(op: Op, walk: Walk) -> Result:
    """``(n) x (m) -> (n, m)``, added to a matrix in ``addr``."""
    names = [name for key in ("self", "vec1", "vec2", "other") for name in references(op.arguments.get(key))]
    a, b = (walk.dims(Ref(name))[0] for name in names[-2:])
    added = [walk.dims(Ref(names[0]))] if len(names) == 3 else []
    return walk.broadcast(shape_of(op), [[a, b], *added])


def addmv(op: Op, walk: Walk) -> Result:
    """``bias + (n, i) x (i)``."""
    matrix, vector = walk.dims(op.arguments["mat"]), walk.dims(op.arguments["vec"])
    walk.unify(matrix[1], vector[0])
    contract(op, walk, matrix[1])
    return walk.broadcast(shape_of(op), [[matrix[0]], walk.dims(op.arguments["self"])])


def tensordot(op: Op, walk: Walk) -> Result:
    """Contract pairs of dims, and keep the others in order; ``inner`` contracts the last ones."""
    a, b = walk.dims(op.arguments["self"]), walk.dims(op.arguments["other"])
    left = [int(i) % len(a) for i in op.arguments.get("dims_self", (-1,))]
    right = [int(i) % len(b) for i in op.arguments.get("dims_other", (-1,))]
    for i, j in zip(left, right, strict=True):
        walk.unify(a[i], b[j])
        contract(op, walk, b[j])
    return [d for i, d in enumerate(a) if i not in left] + [d for j, d in enumerate(b) if j not in right]


def bilinear(op: Op, walk: Walk) -> Result:
    """``(..., i) x (o, i, j) x (..., j) -> (..., o)``."""
    a, b, weight, bias = (walk.dims(op.arguments.get(n)) for n in ("input1", "input2", "weight", "bias"))
    for x, dim in ((a, weight[1]), (b, weight[2])):
        walk.unify(x[-1], dim)
        contract(op, walk, dim)
    if bias:
        walk.unify(bias[0], weight[0])
    return [*walk.broadcast(shape_of(op)[:-1], [a[:-1], b[:-1]]), weight[0]]


def distance(op: Op, walk: Walk) -> Result:
    """``(..., n, i) x (..., m, i) -> (..., n, m)``: a norm runs over i."""
    a, b = walk.dims(op.arguments["x1"]), walk.dims(op.arguments["x2"])
    walk.unify(a[-1], b[-1])
    walk.blocked([a[-1], b[-1]], "a distance needs it whole")
    return [*walk.broadcast(shape_of(op)[:-2], [a[:-2], b[:-2]]), a[-2], b[-2]]


def grouped(op: Op, walk: Walk) -> Result:
    """``(tokens, i) x (experts, i, o) -> (tokens, o)``, tokens sorted by expert."""
    tokens, experts = (walk.dims(Ref(name)) for name in references(op.arguments)[:2])
    if len(tokens) != 2 or len(experts) != 3 or isinstance(op.arguments.get("bias"), Ref):
        return unsupported(op, walk)
    walk.unify(tokens[1], experts[1])
    contract(op, walk, experts[1])
    offsets = walk.dims(op.arguments.get("offs"))
    walk.blocked([experts[0], tokens[0], *offsets], "experts pick their tokens by number")
    return [tokens[0], experts[2]]


RULES: dict[str, Rule] = {
    "aten.linear": linear,
    "aten.addmm": addmm,
    "aten.baddbmm": addmm,
    "aten.matmul": matmul,
    "aten.mm": matmul,
    "aten.bmm": matmul,
    "aten.mv": matmul,
    "aten.dot": matmul,
    "aten.outer": outer,
    "aten.ger": outer,
    "aten.addr": outer,
    "aten.addmv": addmv,
    "aten.tensordot": tensordot,
    "aten.inner": tensordot,
    "aten.bilinear": bilinear,
    "aten.cdist": distance,
    "aten.embedding_bag": bag,
    "aten._grouped_mm": grouped,
    "transformers.grouped_mm_fallback": grouped,
    "aten.einsum": einsum,
    "aten.embedding": embedding,
}
