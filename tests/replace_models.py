"""Models of torch's own attention and transformer layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WIDTH, HEADS, VOCAB = 32, 4, 24


class Language(nn.Module):
    """torch's encoder over tokens, causal by a mask that it has to look into."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device).triu(1)
        return self.head(self.encoder(self.table(ids), mask))  # type: ignore[no-any-return]


class Translation(nn.Module):
    """torch's whole transformer, length first: attention to itself and to the encoder's answer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 1, 2, 48, dropout=0.0, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids).transpose(0, 1)
        y = self.transformer(x, x.flip(0), src_key_padding_mask=ids == 1)
        return self.head(y.transpose(0, 1))  # type: ignore[no-any-return]


class Attending(nn.Module):
    """One attention of any kind between a norm and a linear; also returns the weights where they are asked for."""

    def __init__(
        self,
        heads: int = HEADS,
        weights: bool = False,
        average: bool = True,
        cross: bool = False,
        **options: bool | int,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, heads, **options)
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.weights, self.average, self.cross = weights, average, cross

    def forward(
        self, x: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        y = self.norm(x)
        key, value = (key, value) if self.cross else (y, y)
        y, weights = self.attention(
            y,
            key,
            value,
            attn_mask=attn_mask,
            key_padding_mask=padding,
            need_weights=self.weights,
            average_attn_weights=self.average,
        )
        return x + self.down(torch.relu(self.up(x + y))), weights
