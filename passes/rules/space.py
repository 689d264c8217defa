"""Ops whose result reads a neighbourhood: pooling, resizing, windows, padding, Fourier transforms.

The dims they run along are needed whole; the dims before those pass.
"""

from __future__ import annotations

from autoshard.ir import Meta, Op, Ref, references
from autoshard.passes.factors import Factor, product
from autoshard.passes.rules.walk import Dims, Result, Rule, Walk, dim_of, dims_of, shape_of


def last(number: int, why: str) -> Rule:
    """Return the rule of an op that runs along the last ``number`` dims; two results have one shape."""

    def rule(op: Op, walk: Walk) -> Result:
        dims = walk.dims(Ref(references(op.arguments)[0]))
        metas = op.result if isinstance(op.result, tuple) else (op.result,)
        space = len(dims) - number
        found = [dims[:space] + walk.around(dims[space:], m.shape[space:], why) for m in metas if isinstance(m, Meta)]
        return found if isinstance(op.result, tuple) else found[0]

    return rule


def pad(op: Op, walk: Walk) -> Result:
    """Padded dims are new and blocked, the others pass."""
    dims, shape = walk.dims(op.arguments["self"]), shape_of(op)
    amounts = op.arguments.get("pad", op.arguments.get("padding"))
    for back in range(1, len(amounts) // 2 + 1):
        if amounts[2 * back - 2] or amounts[2 * back - 1]:
            dims[-back] = walk.around([dims[-back]], [shape[-back]], "padding")[0]
    return dims


def windows(op: Op, walk: Walk) -> Result:
    """Sliding windows of one dim: their number, and a last dim along each."""
    dims = walk.dims(op.arguments["self"])
    dim = dim_of(op, "dimension", len(dims))
    number, size = walk.around([dims[dim], Factor(1)], [shape_of(op)[dim], shape_of(op)[-1]], "windows run along it")
    return [*dims[:dim], number, *dims[dim + 1 :], size]


def patches(op: Op, walk: Walk) -> Result:
    """``(n, c, h, w) -> (n, c x kernel, places)``."""
    dims, shape = walk.dims(op.arguments["self"]), shape_of(op)
    channels = dims[-3]
    walk.blocked(dims[-2:], "a convolution runs along it")
    kernel, places = Factor(shape[-2] // channels.size), Factor(shape[-1])
    walk.block(kernel, "it is the kernel of a convolution")
    walk.block(places, "a convolution runs along it")
    return [*dims[:-3], product([channels, kernel]), places]


def unpatched(op: Op, walk: Walk) -> Result:
    """``(n, c x kernel, places) -> (n, c, h, w)``."""
    dims, shape = walk.dims(op.arguments["self"]), shape_of(op)
    channels, kernel = Factor(shape[-3]), Factor(dims[-2].size // shape[-3])
    walk.block(kernel, "it is the kernel of a convolution")
    walk.unify(dims[-2], product([channels, kernel]))
    return [*dims[:-2], channels, *walk.around([dims[-1], Factor(1)], shape[-2:], "a convolution runs along it")]


def shuffle(op: Op, walk: Walk) -> Result:
    """``(..., c x r x r, h, w)`` to ``(..., c, h x r, w x r)`` or back: blocks of channels become space."""
    dims, shape = walk.dims(op.arguments["self"]), shape_of(op)
    channels = Factor(min(dims[-3].size, shape[-3]))
    within = Factor(max(dims[-3].size, shape[-3]) // channels.size)
    walk.block(within, "its elements are places in space")
    fused = product([channels, within])
    walk.unify(dims[-3], fused if dims[-3].size == fused.size else channels)
    made = channels if dims[-3].size == fused.size else fused
    return [*dims[:-3], made, *walk.around(dims[-2:], shape[-2:], "its elements are places in space")]


def sampled(op: Op, walk: Walk) -> Result:
    """``(n, c, space) x (n, places, coordinates) -> (n, c, places)``."""
    x, grid = walk.dims(op.arguments["input"]), walk.dims(op.arguments["grid"])
    walk.unify(x[0], grid[0])
    walk.blocked([*x[2:], grid[-1]], "places are sampled by coordinate")
    return [*x[:2], *grid[1:-1]]


def fourier(op: Op, walk: Walk) -> Result:
    """A transform along some dims."""
    dims, shape = walk.dims(op.arguments["self"]), shape_of(op)
    many = op.target.endswith(("n", "shift"))
    picked = dims_of(op, "dim", len(dims)) if many or op.arguments.get("dim") is not None else [len(dims) - 1]
    out: Dims = []
    for i, dim in enumerate(dims):
        out += walk.around([dim], [shape[i]], "a Fourier transform runs along it") if i in picked else [dim]
    return out


_POOLS = {n: f"max_pool{n}d max_pool{n}d_with_indices avg_pool{n}d adaptive_avg_pool{n}d adaptive_max_pool{n}d"
          for n in (1, 2, 3)}  # fmt: skip
_RESIZES = {
    1: "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d",
    2: "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa",
    3: "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d",
}
_FOURIER = "fft ifft rfft irfft hfft ihfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn fftshift ifftshift".split()

RULES: dict[str, Rule] = {
    **{f"aten.{name}": last(n, "pooling runs along it") for n, names in _POOLS.items() for name in names.split()},
    **{f"aten.{name}": last(n, "resizing runs along it") for n, names in _RESIZES.items() for name in names.split()},
    **dict.fromkeys(["aten.pad", "aten.constant_pad_nd"], pad),
    **{f"aten.{kind}_pad{n}d": pad for kind in ("reflection", "replication") for n in (1, 2, 3)},
    "aten.unfold": windows,
    "aten.im2col": patches,
    "aten.col2im": unpatched,
    **dict.fromkeys(["aten.pixel_shuffle", "aten.pixel_unshuffle"], shuffle),
    **dict.fromkeys(["aten.grid_sampler", "aten.grid_sampler_2d", "aten.grid_sampler_3d"], sampled),
    **{f"aten.fft_{name}": fourier for name in _FOURIER},
}
