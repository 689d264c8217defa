"""Reductions, softmaxes and scans: what they need whole is blocked, sums are contractions."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.ir import Meta, Op, Ref, references
from autoshard.passes.factors import Factor
from autoshard.passes.rules.pointwise import pointwise
from autoshard.passes.rules.walk import Dims, Result, Rule, Walk, dim_of, dims_of


def _reduced(op: Op, walk: Walk, each: Callable[[Factor], None]) -> Dims:
    dims = walk.dims(op.arguments["self"])
    picked = set(dims_of(op, "dim", len(dims)))
    keep = bool(op.arguments.get("keepdim", False))
    out: Dims = []
    for i, dim in enumerate(dims):
        if i not in picked:
            out.append(dim)
            continue
        each(dim)
        if keep:
            out.append(Factor(1))
    return out


def sum_(op: Op, walk: Walk) -> Result:
    """A sum over a cut dim is a partial sum."""
    return _reduced(op, walk, lambda dim: walk.contract(dim, "sum"))


def whole(why: str) -> Rule:
    """Return the rule of a reduction that needs its dims whole; both results of a pair have one shape."""

    def rule(op: Op, walk: Walk) -> Result:
        if op.overload == "other":  # the larger or smaller of two tensors, element by element
            return pointwise(op, walk)
        out = _reduced(op, walk, lambda dim: walk.block(dim, why))
        return [list(out) for _ in op.result] if isinstance(op.result, tuple) else out

    return rule


def along(why: str) -> Rule:
    """Return the rule of an op that works along one dim and keeps it (softmax, cumsum, sort, topk)."""

    def rule(op: Op, walk: Walk) -> Result:
        dims = walk.dims(op.arguments["self"])
        if not dims:
            return []
        dim = dim_of(op, "dim", len(dims), -1)
        walk.block(dims[dim], why)
        metas = op.result if isinstance(op.result, tuple) else (op.result,)
        results: list[Dims | None] = []
        for meta in metas:
            out = list(dims)
            if meta is not None and meta.shape[dim] != dims[dim].size:
                out[dim] = Factor(meta.shape[dim])
                walk.block(out[dim], why)
            results.append(out)
        return results if isinstance(op.result, tuple) else results[0]

    return rule


def loss(op: Op, walk: Walk) -> Result:
    """A loss compares along its class dim and averages over the rest: every extent is needed whole."""
    for name in references(op.arguments):
        for dim in walk.dims(Ref(name)):
            walk.block(dim, "a loss needs it whole")
    return walk.fresh(op.result if isinstance(op.result, Meta) else None)


_LOSSES = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss
gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss nll_loss
nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
""".split()
_WHOLE = {
    "mean": "a mean needs it whole",
    **dict.fromkeys(["amax", "amin", "max", "min", "aminmax"], "a maximum needs it whole"),
    **dict.fromkeys(["argmax", "argmin"], "an argmax needs it whole"),
    **dict.fromkeys(["var", "std", "var_mean", "std_mean"], "a variance needs it whole"),
    **dict.fromkeys(["norm", "linalg_vector_norm"], "a norm needs it whole"),
    **dict.fromkeys(["logsumexp", "any", "all", "prod", "median"], "a reduction needs it whole"),
}
_ALONG = {
    **dict.fromkeys(["softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax"], "softmax needs it whole"),
    **dict.fromkeys(["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "diff"], "a scan runs along it"),
    **dict.fromkeys(["sort", "argsort", "topk", "kthvalue"], "sorting needs it whole"),
    "glu": "glu halves it",
}

RULES: dict[str, Rule] = {
    "aten.sum": sum_,
    **{f"aten.{name}": loss for name in _LOSSES},
    **{f"aten.{name}": whole(why) for name, why in _WHOLE.items()},
    **{f"aten.{name}": along(why) for name, why in _ALONG.items()},
}
