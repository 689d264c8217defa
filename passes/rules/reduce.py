"""Reductions, softmaxes and scans: what they need whole is blocked, sums are contractions."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.ir import Op
from autoshard.passes.factors import Factor
from autoshard.passes.rules.pointwise import pointwise
from autoshard.passes.rules.shape import unsupported
from autoshard.passes.rules.walk import Dims, Result, Rule, Walk, dim_of, dims_of
from autoshard.passes.unify import take


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


def mean(op: Op, walk: Walk) -> Result:
    """A mean over a cut dim is the mean of the ranks' own means: their shares are equal."""
    return _reduced(op, walk, lambda dim: walk.contract(dim, "mean"))


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


def glu(op: Op, walk: Walk) -> Result:
    """One half of a dim gates the other: the halves are the same."""
    dims = walk.dims(op.arguments["self"])
    dim = dim_of(op, "dim", len(dims), -1)
    half = dims[dim].size // 2
    first, second = (take(dims[dim], i * half, (i + 1) * half, walk.reason("a slice")) for i in (0, 1))
    walk.unify(first, second)
    dims[dim] = first
    return dims


def everything(why: str) -> Rule:
    """Return the rule of an op that needs every extent whole."""
    return lambda op, walk: unsupported(op, walk, why)


_LOSSES = """
binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss
gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss margin_ranking_loss mse_loss nll_loss
nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
""".split()
_WHOLE = {
    **dict.fromkeys(["amax", "amin", "max", "min", "aminmax"], "a maximum needs it whole"),
    **dict.fromkeys(["argmax", "argmin"], "an argmax needs it whole"),
    **dict.fromkeys(["var", "std", "var_mean", "std_mean"], "a variance needs it whole"),
    **dict.fromkeys(["norm", "linalg_vector_norm"], "a norm needs it whole"),
    **dict.fromkeys("logsumexp any all prod median nanmedian mode kthvalue".split(), "a reduction needs it whole"),
    **dict.fromkeys("nansum nanmean count_nonzero frobenius_norm".split(), "a reduction needs it whole"),
}
_ALONG = {
    **dict.fromkeys(["softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax"], "softmax needs it whole"),
    **dict.fromkeys(["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "diff"], "a scan runs along it"),
    **dict.fromkeys(["sort", "argsort", "topk"], "sorting needs it whole"),
    **dict.fromkeys(["cross", "linalg_cross"], "a vector product mixes it"),
}
_EVERYTHING = {
    **dict.fromkeys(["masked_scatter", "masked_scatter_"], "a mask counts the elements it fills"),
    **dict.fromkeys(["masked_select", "nonzero", "argwhere", "unique", "_unique2", "unique_consecutive"],
                    "its shape depends on values"),
    **dict.fromkeys(["item", "_local_scalar_dense", "_is_all_true", "is_nonzero", "equal"], "the code reads its value"),
    **dict.fromkeys(["stft", "istft"], "a Fourier transform runs along it"),
    **dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], "a recurrent layer is one op"),
    **dict.fromkeys("linalg_inv linalg_solve linalg_det linalg_cholesky linalg_qr linalg_svd linalg_eigh "
                    "matrix_exp linalg_matrix_norm linalg_norm".split(), "linear algebra needs it whole"),
}  # fmt: skip

RULES: dict[str, Rule] = {
    "aten.sum": sum_,
    "aten.mean": mean,
    "aten.glu": glu,
    # a loss compares along its class dim and averages over the rest
    **dict.fromkeys([f"aten.{name}" for name in _LOSSES], everything("a loss needs it whole")),
    **{f"aten.{name}": everything(why) for name, why in _EVERYTHING.items()},
    **{f"aten.{name}": whole(why) for name, why in _WHOLE.items()},
    **{f"aten.{name}": along(why) for name, why in _ALONG.items()},
}
