"""torch's multi-head attention, written so that it runs on a rank's share of its heads.

torch computes it in one functional call that checks global sizes and reads ``out_proj.weight`` past the module: no
cut can run in that, and no hook of ``out_proj`` is called. Here sizes come from the tensors, and ``out_proj`` is
called as the module it is, so that a partial sum ends at its boundary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.MultiheadAttention):
    """Multi-head attention with torch's arguments, parameters and answers; instances are made by ``replace.apply``.

    L and S are the lengths of the query and of the key, N the batch, E the query's width, H the number of heads and
    D = E / H. Under a plan a rank has H / tp of the heads; E, D and ``num_heads`` stay what they are.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the attended values, and the weights where they are asked for.

        Args:
            query: (L, N, E), or (N, L, E) with ``batch_first``, or (L, E).
            key: (S, N, kdim), or (N, S, kdim), or (S, kdim).
            value: (S, N, vdim), or (N, S, vdim), or (S, vdim).
            key_padding_mask: (N, S) or (S): true, or minus infinity, where a key is not attended to.
            need_weights: whether the weights are returned.
            attn_mask: (L, S) or (N * H, L, S): true, or a number that is added to the score.
            average_attn_weights: whether returned weights are averaged over the heads.
            is_causal: says that ``attn_mask`` is the causal mask, which may then be built by the kernel.

        Returns:
            The attended values, in the query's layout; the weights, (N, L, S) or (N, H, L, S) and without N where the
            query has none, or None.

        Raises:
            ValueError: shapes do not fit, a mask is neither bool nor float, or a tensor is nested.
        """
        self._check(query, key, value, key_padding_mask, attn_mask)
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint that attn_mask is causal: give attn_mask too")
        batched, dtype = query.dim() == 3, query.dtype
        q, k, v = self._project(query, key, value)
        q, k = (self._by_head(x.unflatten(-1, (-1, self.head_dim)), batched) for x in (q, k))
        # the number of heads here is the keys': values can be cut by head, and inside each head
        v = self._by_head(v.unflatten(-1, (k.shape[1], -1)), batched)
        if key_padding_mask is not None:
            key_padding_mask = _added(key_padding_mask, dtype)[..., None, None, :]  # (N, 1, 1, S) or (1, 1, S)
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if attn_mask is None or causal else self._over_heads(_added(attn_mask, dtype), q, k)
        k, v, mask, key_padding_mask = self._more_keys(k, v, mask, key_padding_mask)
        if key_padding_mask is not None:
            mask = key_padding_mask if mask is None else mask + key_padding_mask
        weights = None
        if need_weights:
            y, weights = self._attend(q, k, v, mask, average_attn_weights)
        else:
            dropped = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, mask, dropped, causal)
        answer = self.out_proj(y.permute(2, 0, 1, 3).flatten(2))  # (L, N, E) in memory, whatever the layout: as torch
        if not batched:
            return answer.squeeze(1), None if weights is None else weights.squeeze(0)
        if self.batch_first:
            answer = answer.transpose(0, 1)
            if not self.training and not torch.is_grad_enabled():
                answer = answer.contiguous()  # as torch's fast path gives it: code for inference may take views of it
        return answer, weights

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None, attn_mask: Tensor | None
    ) -> None:
        """Refuse what torch refuses, and what would otherwise be broadcast."""
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError("attention under a plan takes no nested tensors: pad them and give key_padding_mask")
        dims = (query.dim(), key.dim(), value.dim())
        if dims not in ((2, 2, 2), (3, 3, 3)):
            raise ValueError(f"query, key and value have {dims} dims; allowed: (2, 2, 2), (3, 3, 3)")
        if query.shape[-1] != self.embed_dim:
            raise ValueError(f"the query has {query.shape[-1]} features; allowed: {self.embed_dim}")
        if key.shape[:-1] != value.shape[:-1]:
            raise ValueError(f"key {tuple(key.shape)} and value {tuple(value.shape)} differ in length or batch")
        batch = 1 if self.batch_first else 0
        length = key.shape[batch] if key.dim() == 3 else key.shape[0]
        if key_padding_mask is not None:
            wanted = (key.shape[1 - batch], length) if key.dim() == 3 else (length,)
            if tuple(key_padding_mask.shape) != wanted:
                raise ValueError(f"key_padding_mask is {tuple(key_padding_mask.shape)}; allowed: {wanted}")
        if attn_mask is not None:
            wanted = (query.shape[batch] if query.dim() == 3 else query.shape[0], length)
            if attn_mask.dim() not in (2, 3) or tuple(attn_mask.shape[-2:]) != wanted:
                raise ValueError(f"attn_mask is {tuple(attn_mask.shape)}; allowed: {wanted}, or one for each head")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v, laid out as given, with E features, or a rank's share of them."""
        weight, bias = self.in_proj_weight, self.in_proj_bias
        if self._qkv_same_embed_dim:
            # values have as many features as out_proj takes: theirs may be cut where those of q and k are not
            of_values = self.out_proj.weight.shape[1]
            rows = [(weight.shape[0] - of_values) // 2] * 2 + [of_values]
            if query is key and key is value:
                q, k, v = F.linear(query, weight, bias).split(rows, dim=-1)
                return q, k, v
            of_q, of_k, of_v = weight.split(rows)
        else:
            of_q, of_k, of_v = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            rows = [of_q.shape[0], of_k.shape[0], of_v.shape[0]]
        q_bias, k_bias, v_bias = (None, None, None) if bias is None else bias.split(rows)
        return F.linear(query, of_q, q_bias), F.linear(key, of_k, k_bias), F.linear(value, of_v, v_bias)

    def _by_head(self, x: Tensor, batched: bool) -> Tensor:
        """Return (N, H, L, D) from (..., H, D) in the layout of the arguments."""
        if not batched:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _over_heads(self, mask: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return the mask of each head, (N, H, L, S), or one that all share, (L, S)."""
        if mask.dim() == 2:
            return mask
        rows = q.shape[0] * q.shape[1]
        if mask.shape[0] != rows:
            raise ValueError(f"attn_mask is {tuple(mask.shape)}; allowed: {(rows, q.shape[2], k.shape[2])}")
        each: Tensor = mask.unflatten(0, (-1, q.shape[1]))
        return each

    def _more_keys(
        self, k: Tensor, v: Tensor, mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return keys and values with the learned one and the zero one, where there are such; no mask hides them."""
        more = 0
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, row.unflatten(-1, (k.shape[1], -1)).transpose(1, 2).expand(x.shape[0], -1, -1, -1)], 2)
                for x, row in ((k, self.bias_k), (v, self.bias_v))
            )
            more += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            more += 1
        if more and mask is not None:
            mask = F.pad(mask, (0, more))
        if more and key_padding_mask is not None:
            key_padding_mask = F.pad(key_padding_mask, (0, more))
        return k, v, mask, key_padding_mask

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, average: bool) -> tuple[Tensor, Tensor]:
        """Return what the heads attend to and with which weights: kernels return no weights."""
        scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
        weights = F.softmax(scores if mask is None else scores + mask, dim=-1)
        if self.training and self.dropout > 0.0:
            weights = F.dropout(weights, self.dropout)
        y = weights @ v
        # a mean over a rank's own heads would divide by their number
        return y, weights.sum(dim=1) / self.num_heads if average else weights


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the mask as numbers that are added to the scores."""
    if mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise ValueError(f"a mask is {mask.dtype}; allowed: bool and floating types")
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
