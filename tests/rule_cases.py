"""Calls of every op that has a rule: ``name -> (function of inputs and weights, inputs, weights)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Case = tuple[Callable[..., Any], tuple[Any, ...], list[Tensor]]
B, S, D, H, K = 2, 6, 16, 4, 8


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ids(*shape: int, high: int = 8) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(0))


X = (rand(B, S, D),)
Q, KEY, V = rand(B, H, S, K), rand(B, H, S, K, seed=1), rand(B, H, S, K, seed=2)
W, B1 = rand(12, D), rand(12)

CASES: dict[str, Case] = {
    "linear": (F.linear, X, [W, B1]),
    "linear then row": (lambda x, w, v: F.linear(F.linear(x, w), v), X, [W, rand(D, 12)]),
    "addmm": (lambda x, w, b: torch.addmm(b, x.flatten(0, 1), w), X, [rand(D, 12), B1]),
    "addmm row": (lambda x, w, v, b: torch.addmm(b, (x @ w).flatten(0, 1), v), X, [rand(D, 12), rand(12, D), rand(D)]),
    "baddbmm": (lambda x, w, b: torch.baddbmm(b, x, w), X, [rand(B, D, 12), rand(B, 1, 12)]),
    "matmul": (lambda x, w: x @ w, X, [rand(D, 12)]),
    "matmul vector": (lambda x, w: x @ w, X, [rand(D)]),
    "bmm": (lambda x, w: torch.bmm(x, w), X, [rand(B, D, 12)]),
    "mv": (lambda x, w: torch.mv(x[0], w), X, [rand(D)]),
    "outer": (lambda x, w: torch.outer(x[0, 0], w), X, [rand(12)]),
    "einsum": (lambda x, w, o: torch.einsum("bhsk,hkd->bsd", torch.einsum("bsd,dhk->bhsk", x, w), o), X,
               [rand(D, H, K), rand(H, K, D)]),
    "einsum dots": (lambda x, w: torch.einsum("...d,de->...e", x, w), X, [rand(D, 12)]),
    "embedding": (lambda i, w: F.embedding(i, w), (ids(B, S),), [rand(8, D)]),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), (Q, KEY, V), []),
    "attention mask": (F.scaled_dot_product_attention, (Q, KEY, V, rand(1, H, S, S)), []),
    "attention grouped": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), (Q, KEY[:, :2], V[:, :2]), []),
    "heads": (lambda x, w: F.linear(x, w).view(B, S, -1, K).transpose(1, 2), X, [rand(H * K, D)]),
    "heads back": (lambda q: q.transpose(1, 2).reshape(B, S, -1), (Q,), []),
    "flatten unflatten": (lambda q: q.flatten(1, 2).unflatten(1, (H, S)), (Q,), []),
    "permute": (lambda q: q.permute(3, 0, 2, 1), (Q,), []),
    "movedim": (lambda q: q.movedim(1, -1), (Q,), []),
    "squeeze": (lambda q: q.unsqueeze(2).squeeze(2), (Q,), []),
    "expand": (lambda q: q.unsqueeze(2).expand(B, H, 3, S, K).reshape(B, 3 * H, S, K), (Q,), []),
    "repeat": (lambda q: q.repeat(1, 3, 1, 2), (Q,), []),
    "repeat_interleave": (lambda q: q.repeat_interleave(3, 1), (Q,), []),
    "chunk": (lambda x: x.chunk(2, -1), X, []),
    "split": (lambda x: x.split([4, 8, 4], -1), X, []),
    "slice": (lambda x: x[..., 4:12] * 2, X, []),
    "slice stride": (lambda x: x[..., ::2] + x[..., 1::2], X, []),
    "narrow": (lambda x: x.narrow(-1, 4, 8), X, []),
    "unbind": (lambda q: q.unbind(1), (Q,), []),
    "select unbind": (lambda q: q[:, 0] + q.unbind(1)[1], (Q,), []),
    "rotate half": (lambda q: torch.cat([-q[..., K // 2 :], q[..., : K // 2]], -1), (Q,), []),
    "cat heads": (lambda q, k: torch.cat([q, k], 2), (Q, KEY), []),
    "stack": (lambda q, k: torch.stack([q, k], 1), (Q, KEY), []),
    "gated": (lambda x, w: F.silu(F.linear(x, w).chunk(2, -1)[0]) * F.linear(x, w).chunk(2, -1)[1], X, [rand(24, D)]),
    "glu": (lambda x, w: (F.glu(x), F.glu(F.linear(x, w).transpose(1, 2), 1)), X, [rand(24, D)]),
    "empty": (lambda x: (x[..., :0].view(B, 1, S, 0), x * 2), X, []),
    "sum": (lambda x: x.sum(-1) + x.sum(1, keepdim=True)[..., 0], X, []),
    "var": (lambda x: torch.var_mean(x, 1), X, []),
    "mean var": (lambda x: (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True), X, []),
    "max": (lambda x: x.amax(1) + x.max(1).values, X, []),
    "max of two": (lambda x, w: torch.min(x, w) + torch.max(x, w), X, [rand(D)]),
    "softmax": (lambda q: q.softmax(-1), (Q,), []),
    "cumsum sort": (lambda x: x.cumsum(1) + x.sort(1).values, X, []),
    "topk": (lambda x: x.topk(4, -1), X, []),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (D,), w, b), X, [rand(D), rand(D)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (D,), w), X, [rand(D)]),
    "norm per head": (lambda q, w: q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True)) * w, (Q,), [rand(K)]),
    "batch_norm": (lambda x, w: F.batch_norm(x.transpose(1, 2), None, None, w, training=True), X, [rand(D)]),
    "group_norm": (lambda x, w, b: F.group_norm(x.transpose(1, 2), 4, w, b), X, [rand(D), rand(D)]),
    "conv1d": (lambda x, w, b: F.conv1d(x.transpose(1, 2), w, b, padding=1), X, [rand(12, D, 3), rand(12)]),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), (rand(B, 4, 8, 8),), [rand(12, 4, 2, 2)]),
    "conv depthwise": (lambda x, w: F.conv1d(x.transpose(1, 2), w, groups=D, padding=1), X, [rand(D, 1, 3)]),
    "pad": (lambda x: F.pad(x, (0, 0, 1, 2)), X, []),
    "roll": (lambda x: x.roll(1, 1), X, []),
    "flip": (lambda x: x.flip(1), X, []),
    "index": (lambda x, i: x[:, i], (*X, ids(S, high=S)), []),
    "index two": (lambda q, i: q[i[:B], :, i[:B]], (Q, ids(S, high=2)), []),
    "gather": (lambda x, i: x.gather(1, i), (*X, ids(B, 3, D, high=S)), []),
    "scatter": (lambda x, i: torch.zeros_like(x).scatter(1, i, x), (*X, ids(B, S, D, high=S)), []),
    "index_add": (lambda x, i: torch.zeros_like(x).index_add(1, i, x), (*X, ids(S, high=S)), []),
    "where": (lambda x: torch.where(x > 0, x, x * 0.1), X, []),
    "zeros": (lambda q: q + torch.zeros(1, H, S, K), (Q,), []),
    "tril": (lambda q, k: (q @ k.transpose(-1, -2)).tril(), (Q, KEY), []),
    "one_hot": (lambda i, w: F.one_hot(i, 8).to(w.dtype) @ w, (ids(B, S),), [rand(8, D)]),
    "complex": (
        lambda q: torch.view_as_real(torch.view_as_complex(q.unflatten(-1, (-1, 2))) * 2j).flatten(3), (Q,), []),
    "cross_entropy": (lambda x, i: F.cross_entropy(x.flatten(0, 1), i.flatten()), (*X, ids(B, S, high=D)), []),
}  # fmt: skip

IMAGE, SOUND = (rand(B, 8, 6, 6),), (rand(B, 8, 12),)


def written(q: Tensor, i: Tensor, v: Tensor) -> Tensor:
    y = q * 1
    y[:, i] = v
    return y


#: products and lookups
CASES |= {
    "einsum implicit": (lambda x, w: torch.einsum("ij,jk", x[0], w), X, [rand(D, 12)]),
    "einsum three": (lambda x, w, o: torch.einsum("bsd,dh,he->bse", x, w, o), X, [rand(D, 12), rand(12, D)]),
    "einsum batched": (lambda q, w: torch.einsum("bhsk,hkd->bhsd", q, w), (Q,), [rand(H, K, D)]),
    "einsum sums": (lambda x, w: torch.einsum("bsd,de->be", x, w), X, [rand(D, 12)]),
    "einsum scores": (lambda q, k: torch.einsum("bhsk,bhtk->bhst", q, k), (Q, KEY), []),
    "einsum broadcast": (lambda q, w: torch.einsum("...sk,...kd->...sd", q, w), (Q,), [rand(H, K, D)]),
    "tensordot inner": (
        lambda x, w: torch.tensordot(x, w, dims=([2], [1])) + torch.inner(x, w), X, [rand(12, D)]),
    "tensordot two": (lambda q, w: torch.tensordot(q, w, dims=([1, 3], [0, 1])), (Q,), [rand(H, K, D)]),
    "addr": (lambda x, w, v: torch.addr(w, x[0, 0], v), X, [rand(D, 12), rand(12)]),
    "addmv": (lambda x, w, b: torch.addmv(b, w, x[0, 0]), X, [rand(12, D), rand(12)]),
    "bilinear": (lambda x, w, b: F.bilinear(x, x * 2, w, b), X, [rand(12, D, D), rand(12)]),
    "bag": (lambda i, w: F.embedding_bag(i, w, mode="sum"), (ids(B, S),), [rand(8, D)]),
    "cdist": (lambda x, w: torch.cdist(x, w), X, [rand(B, 8, D)]),
    "grouped": (lambda x, o, w: torch._grouped_mm(x, w, o),
                (rand(12, D).bfloat16(), torch.tensor([2, 4, 8, 12], dtype=torch.int32)), [rand(4, D, 8).bfloat16()]),
    "scores": (lambda q, k: q @ k.transpose(-1, -2), (Q, KEY), []),
}  # fmt: skip

#: convolutions and other neighbourhoods
CASES |= {
    "conv grouped": (lambda x, w, b: F.conv1d(x, w, b, groups=4), SOUND, [rand(16, 2, 3), rand(16)]),
    "conv grouped then 1x1": (
        lambda x, w, v: F.conv2d(F.conv2d(x, w, groups=2), v), IMAGE, [rand(12, 4, 3, 3), rand(4, 12, 1, 1)]),
    "conv unbatched": (lambda x, w: F.conv1d(x[0], w), SOUND, [rand(12, 8, 3)]),
    "conv fused channels": (
        lambda x, w, c: F.conv1d(F.linear(x, w).transpose(1, 2), c, groups=16, padding=1).split([8, 4, 4], 1), X,
        [rand(16, D), rand(16, 1, 3)]),
    "conv transposed": (lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), IMAGE, [rand(8, 6, 2, 2), rand(6)]),
    "conv transposed grouped": (lambda x, w: F.conv_transpose1d(x, w, groups=4), SOUND, [rand(8, 3, 2)]),
    "conv3d": (lambda x, w: F.conv3d(x[..., None], w), IMAGE, [rand(4, 8, 2, 2, 1)]),
    "pooling": (
        lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 3), F.adaptive_avg_pool2d(x, 1)),
        IMAGE, []),
    "pooling 1d": (lambda x: (F.max_pool1d(x, 2), F.avg_pool1d(x, 3), F.adaptive_avg_pool1d(x, 4)), SOUND, []),
    "pooling pairs": (lambda x: F.max_pool2d(x, 2, return_indices=True), IMAGE, []),
    "resizing": (
        lambda x: (F.interpolate(x, scale_factor=2), F.interpolate(x, size=(4, 4), mode="bilinear"),
                   F.interpolate(x, size=(8, 8), mode="bicubic", antialias=True)), IMAGE, []),
    "resizing 1d": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), SOUND, []),
    "padding": (lambda x: (F.pad(x, (1, 1, 0, 2)), F.pad(x, (1, 2, 1, 2), mode="reflect")), IMAGE, []),
    "unfold fold": (lambda x: F.fold(F.unfold(x, 2), (6, 6), 2), IMAGE, []),
    "windows": (lambda x: x.unfold(-1, 4, 2), SOUND, []),
    "pixel shuffle": (lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2), IMAGE, []),
    "grid sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), (*IMAGE, rand(B, 4, 4, 2)), []),
    "fourier": (lambda q: (torch.fft.rfft(q, dim=2), torch.fft.fft(q, dim=2).real, torch.fft.fftn(q, dim=(2, 3)).imag),
                (Q,), []),
    "fourier shift": (lambda q: torch.fft.fftshift(q, dim=(2,)), (Q,), []),
}  # fmt: skip

#: norms
CASES |= {
    "group_norm image": (lambda x: F.group_norm(x, 4), IMAGE, []),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), IMAGE, [rand(8), rand(8)]),
    "batch_norm eval": (
        lambda x, m, v, w, b: F.batch_norm(x, m, v.abs(), w, b), (*IMAGE, rand(8), rand(8)), [rand(8), rand(8)]),
    "weight_norm": (lambda x, v, g: F.linear(x, torch._weight_norm(v, g, 0)), X, [rand(12, D), rand(12, 1)]),
    "cosine": (lambda q, k: F.cosine_similarity(q, k, dim=-1), (Q, KEY), []),
    "cosine in front": (lambda q, k: F.cosine_similarity(q, k, dim=1), (Q, KEY), []),
    "norms": (lambda q: (F.normalize(q, dim=-1), q.norm(dim=1)), (Q,), []),
    "scans": (lambda q: (q.log_softmax(1), q.logsumexp(1), q.cumprod(2), q.cummax(2).values, q.diff(dim=2)), (Q,), []),
    "prod": (lambda q: q.prod(1), (Q,), []),
    "argmax": (lambda q: q.argmax(1), (Q,), []),
    "matrix inverse": (torch.linalg.inv, (Q[..., :6],), []),
    "reductions": (
        lambda q: (q.prod(1), q.argmax(2), q.median(-1).values, torch.var_mean(q, 1), (q > 0).any(2), q.std(-1),
                   (q > 0).count_nonzero(1), q.nansum(1)), (Q,), []),
    "kth mode": (lambda q: (q.kthvalue(2, dim=1).values, q.argsort(1), q.amin((1, 2), keepdim=True)), (Q,), []),
    "cross": (lambda q: torch.linalg.cross(q[..., :3], q[..., 3:6]), (Q,), []),
}  # fmt: skip

#: picking and writing
CASES |= {
    "index list": (lambda x: (x[..., [-1], :], x[:, :, [0, 9]]), (rand(B, S, 10, D),), []),
    "index list heads": (lambda x, w: F.linear(x, w).unflatten(-1, (10, 2))[..., [-2, -1], :], X, [rand(20, D)]),
    "index mask": (lambda x, m: torch.where(m[..., None], x, 0.0), (*X, ids(B, S) > 3), []),
    "index_put": (lambda x, i, v: (x * 1).index_put_((i, i), v, accumulate=True), (*X, ids(3, high=2), rand(3, D)), []),
    "index_put middle": (written, (Q, ids(2, high=H), rand(B, 2, S, K)), []),
    "index_put mask": (lambda x, m: (x * 1).index_put_((m,), x.new_zeros(())), (*X, ids(B, S) > 3), []),
    "inverse": (lambda x, i: x.new_zeros(S).index_put_((i,), x[0, :, 0]), (*X, ids(S, high=S)), []),
    "take_along_dim": (lambda x, i: torch.take_along_dim(x, i, 1), (*X, ids(B, 4, D, high=S)), []),
    "gather fewer": (lambda x, i: x.gather(1, i), (*X, ids(B, S, 4, high=S)), []),
    "index_copy fill": (
        lambda x, i: (torch.zeros_like(x).index_copy(1, i, x), x.index_fill(1, i[:2], 3.0)), (*X, torch.arange(S)), []),
    "scatter number": (lambda x, i: torch.zeros_like(x).scatter(1, i, 1.0), (*X, ids(B, 4, D, high=S)), []),
    "scatter_reduce": (
        lambda x, i: torch.zeros_like(x).scatter_reduce(1, i, x, "amax"), (*X, ids(B, S, D, high=S)), []),
    "masked_scatter": (lambda x: x.masked_scatter(x > 0, x * 2), X, []),
    "by table": (lambda x, t: (torch.bucketize(x, t), torch.isin(x, t)), (*X, rand(4).sort().values), []),
    "searchsorted": (torch.searchsorted, (Q.sort(-1).values, V), []),
    "histogram": (lambda x: torch.histc(x, 4, -1, 1), X, []),
}  # fmt: skip

#: moving
CASES |= {
    "slice behind": (
        lambda x, w: (F.linear(x, w)[..., :8], F.linear(x, w)[..., 8:10], F.linear(x, w)[..., -2:]), X, [rand(12, D)]),
    "slice of heads": (lambda x, w: F.linear(x, w).view(B, S, H, 3 * K)[..., K : 2 * K], X, [rand(H * 3 * K, D)]),
    "slice a product": (lambda x, w: F.linear(x, w).unflatten(-1, (4, 6)).flatten(2)[..., 3:9], X, [rand(24, D)]),
    "slice stride odd": (lambda x: x[..., 1:16:3], X, []),
    "narrow behind": (lambda x, w: F.linear(x, w).narrow(-1, 8, 4), X, [rand(16, D)]),
    "scatter slices": (
        lambda q, k: (q.slice_scatter(k[:, :2], 1, 2, 4), q.select_scatter(k[:, 0], 1, 3), torch.diag_embed(q[..., 0])),
        (Q, KEY), []),
    "diagonal": (lambda q, k: (q @ k.transpose(-1, -2)).diagonal(dim1=-2, dim2=-1), (Q, KEY), []),
    "repeat each": (lambda q, n: (q.repeat_interleave(n, 2, output_size=12), q.flatten().repeat_interleave(2)),
                    (Q, torch.full((S,), 2)), []),
    "hstack": (lambda q, k: torch.hstack([q, k]), (Q, KEY), []),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y, indexing="xy"), (rand(4), rand(6)), []),
    "relative shift": (
        lambda q: F.pad(q @ q.transpose(-1, -2), (1, 0)).view(B, H, S + 1, S)[:, :, 1:].view(B, H, S, S), (Q,), []),
    "prelu": (lambda x, w: F.prelu(x, w), IMAGE, [rand(8)]),
    "arange": (lambda q: q + torch.arange(K), (Q,), []),
    "linspace": (lambda q: q * torch.linspace(0, 1, K), (Q,), []),
    "eye": (lambda q: q @ torch.eye(K, dtype=q.dtype), (Q,), []),
    "tables": (lambda q: q + torch.arange(K) + torch.eye(S, K) + torch.linspace(0, 1, K), (Q,), []),
    "type_as": (lambda q, i: i.type_as(q), (Q, ids(B, H)), []),
    "swaps": (lambda q: (q.swapaxes(1, 2), q.moveaxis(1, 2), q.mT, q[0, 0].t(), q[0].unbind(0)), (Q,), []),
    "split evenly": (lambda x: (x.split(4, -1), x.tensor_split(2, -1)), X, []),
}  # fmt: skip
