"""torch's stacks of transformer layers, without what a cut cannot run in and a trace cannot follow.

An encoder may turn padded sequences into nested tensors for its layers' fused kernels. Both stacks look into a mask
to see whether it is causal: a hint for the kernel that changes no number, and that a trace has no values for.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Encoder(nn.TransformerEncoder):
    """A stack of encoder layers; instances are made by ``replace.apply``."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Return what torch's own does; see there for the arguments."""
        return super().forward(src, mask, src_key_padding_mask, _known(is_causal))


class Decoder(nn.TransformerDecoder):
    """A stack of decoder layers; instances are made by ``replace.apply``."""

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Return what torch's own does; see there for the arguments."""
        return super().forward(
            tgt,
            memory,
            tgt_mask,
            memory_mask,
            tgt_key_padding_mask,
            memory_key_padding_mask,
            _known(tgt_is_causal),
            memory_is_causal,
        )


def _known(is_causal: bool | None) -> bool | None:
    """Return the hint, and False where torch would look into the mask and there is nothing to see."""
    return False if is_causal is None and torch.compiler.is_exporting() else is_causal
