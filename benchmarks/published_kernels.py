"""What publishers ran as one kernel, where transformers computes it otherwise: attention with sinks, routed experts."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

#: The name under which transformers finds ``with_sinks``.
FUSED_SINKS = "fused_with_sinks"


def with_sinks(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, scaling: float, s_aux: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """Attend causally in a fused kernel, with one more logit a head in the softmax that takes no value.

    The logit is the score of a key in front of all others: it alone has a one where each query has its head's sink. A
    query in front of all others keeps what causal means.

    Args:
        module: the attention.
        query: (batch, heads, tokens, size).
        key: the same with fewer heads.
        value: as ``key``.
        mask: None.
        scaling: of scores.
        s_aux: the sinks, one a head.
    """
    batch, heads, tokens, size = query.shape
    groups = key.shape[1]
    sinks = (s_aux / scaling).to(query.dtype).view(1, heads, 1, 1).expand(batch, heads, tokens, 1)
    query = torch.cat([query, sinks], dim=-1)
    query = torch.cat([query.new_zeros(batch, heads, 1, size + 1), query], dim=-2)
    first = torch.cat([key.new_zeros(batch, groups, 1, size), key.new_ones(batch, groups, 1, 1)], dim=-1)
    key = torch.cat([key, key.new_zeros(batch, groups, tokens, 1)], dim=-1)
    key = torch.cat([first, key], dim=-2)
    value = torch.cat([value.new_zeros(batch, groups, 1, size), value], dim=-2)
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return found[:, :, 1:].transpose(1, 2), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Return the mask of attention that is causal in its kernel."""


transformers.AttentionInterface.register(FUSED_SINKS, with_sinks)
transformers.AttentionMaskInterface.register(FUSED_SINKS, _no_mask)


class Experts(nn.Module):
    """Gated experts that work on the tokens sent to them alone: tokens are sorted by expert for one grouped matmul."""

    def __init__(self, hidden: int, wide: int, experts: int) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.empty(experts, hidden, 2 * wide))
        self.out = nn.Parameter(torch.empty(experts, wide, hidden))

    def forward(self, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
        """Map (batch, tokens, hidden) to the same.

        Args:
            x: the tokens.
            chosen: (batch, tokens, each): the experts that each is sent to.
            scores: of the same shape: what their answers are scaled with.
        """
        each, experts = chosen.shape[-1], self.into.shape[0]
        flat = x.reshape(-1, x.shape[-1])
        sorted_by, order = torch.sort(chosen.reshape(-1))
        ends = torch.cumsum(torch.histc(sorted_by.float(), experts, 0, experts - 1), dim=0, dtype=torch.int32)
        gate, up = F.grouped_mm(flat[order // each], self.into, offs=ends).chunk(2, dim=-1)
        made = F.grouped_mm(F.silu(gate) * up, self.out, offs=ends) * scores.reshape(-1)[order].unsqueeze(-1)
        return made[torch.argsort(order)].view(-1, each, x.shape[-1]).sum(dim=1).view(x.shape)


class Routed(nn.Module):
    """A router and its experts, beside one that works on all tokens."""

    def __init__(self, hidden: int, wide: int, experts: int, each: int, shared: nn.Module) -> None:
        """Make the router and the experts.

        Args:
            hidden: size of a token.
            wide: size inside an expert.
            experts: how many there are.
            each: how many a token is sent to.
            shared: the one that works on all.
        """
        super().__init__()
        self.each = each
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(hidden, wide, experts)
        self.shared = shared

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (batch, tokens, hidden) to the same and the logits of the router."""
        logits = self.router(x)
        scores, chosen = torch.sigmoid(logits.float()).topk(self.each, dim=-1)
        return self.experts(x, chosen, scores.to(x.dtype)) + self.shared(x), logits


def route(model: nn.Module) -> nn.Module:
    """Put ``Routed`` in the place of every mixture of a Llama-4 that computes all experts for all tokens."""
    for block in model.model.layers:  # type: ignore[union-attr]
        dense = block.feed_forward
        if isinstance(dense, transformers.models.llama4.modeling_llama4.Llama4TextMoe):
            inner = dense.experts
            block.feed_forward = Routed(
                inner.hidden_size, inner.expert_dim, inner.num_experts, dense.top_k, dense.shared_expert
            )
    return model
