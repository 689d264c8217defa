"""A diffusion transformer over image and text tokens, as FLUX is published: double blocks, then single ones.

Sizes are those of black-forest-labs/FLUX.1-dev: 12 billion parameters. The code is plain and its own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of ``x`` (batch, heads, tokens, head size) by angles (batch, 1, tokens, half a head)."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor, angles: Tensor) -> Tensor:
    """Attend over all tokens; ``angles`` is (batch, tokens, half a head); returns (batch, tokens, width)."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    out = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
    return out.transpose(1, 2).flatten(2)


class Embed(nn.Module):
    """Two linear layers around an activation, from a vector to the width."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(size, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, size) to (batch, width)."""
        return self.second(F.silu(self.first(x)))  # type: ignore[no-any-return]


class Modulate(nn.Module):
    """Shifts, scales and gates from the condition: ``count`` of each."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.linear = nn.Linear(width, 3 * count * width)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """Map (batch, width) to 3 * count tensors (batch, 1, width)."""
        return self.linear(F.silu(condition))[:, None].chunk(3 * self.count, dim=-1)  # type: ignore[no-any-return]


class Heads(nn.Module):
    """Queries, keys and values of one stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_size = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.query_norm = nn.RMSNorm(self.head_size)
        self.key_norm = nn.RMSNorm(self.head_size)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map (batch, tokens, width) to three tensors (batch, heads, tokens, head size)."""
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.query_norm(q), self.key_norm(k), v


class Stream(nn.Module):
    """What one of the two streams of a double block has of its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.modulate = Modulate(width, 2)
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.heads = Heads(width, heads)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def feed(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, width) through the feed-forward."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))  # type: ignore[no-any-return]


class DoubleBlock(nn.Module):
    """Image and text tokens with weights of their own, one attention over both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.image = Stream(width, heads)
        self.text = Stream(width, heads)

    def forward(self, image: Tensor, text: Tensor, condition: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Map both streams (batch, tokens, width); ``angles`` has the text's tokens first."""
        moved = [stream.modulate(condition) for stream in (self.text, self.image)]
        asked = [
            stream.heads((1 + m[1]) * stream.norm1(x) + m[0])
            for stream, x, m in zip((self.text, self.image), (text, image), moved, strict=True)
        ]
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(*asked, strict=True))
        length = text.shape[1]
        mixed = attend(q, k, v, angles)
        text = text + moved[0][2] * self.text.heads.out(mixed[:, :length])
        image = image + moved[1][2] * self.image.heads.out(mixed[:, length:])
        text = text + moved[0][5] * self.text.feed((1 + moved[0][4]) * self.text.norm2(text) + moved[0][3])
        image = image + moved[1][5] * self.image.feed((1 + moved[1][4]) * self.image.norm2(image) + moved[1][3])
        return image, text


class SingleBlock(nn.Module):
    """All tokens together, attention beside the feed-forward, one projection in and one out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.head_size = width, width // heads
        self.modulate = Modulate(width, 1)
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.into = nn.Linear(width, 7 * width)
        self.query_norm = nn.RMSNorm(self.head_size)
        self.key_norm = nn.RMSNorm(self.head_size)
        self.out = nn.Linear(5 * width, width)

    def forward(self, x: Tensor, condition: Tensor, angles: Tensor) -> Tensor:
        """Map (batch, tokens, width)."""
        shift, scale, gate = self.modulate(condition)
        qkv, wide = self.into((1 + scale) * self.norm(x) + shift).split([3 * self.width, 4 * self.width], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        mixed = attend(self.query_norm(q), self.key_norm(k), v, angles)
        return x + gate * self.out(torch.cat((mixed, F.gelu(wide, approximate="tanh")), dim=-1))  # type: ignore[no-any-return]


class Diffusion(nn.Module):
    """The whole model: predicts the velocity of packed latents.

    Args:
        width: of the tokens inside.
        heads: of every attention.
        double: number of double blocks.
        single: number of single blocks.
        latent: channels of a packed latent token.
        text: channels of a text token.
        pooled: size of the pooled text.
        axes: pairs of a head's channels per position axis, times 2; they sum to the head size.
    """

    def __init__(
        self,
        width: int = 3072,
        heads: int = 24,
        double: int = 19,
        single: int = 38,
        latent: int = 64,
        text: int = 4096,
        pooled: int = 768,
        axes: tuple[int, ...] = (16, 56, 56),
    ) -> None:
        super().__init__()
        self.axes = axes
        self.image_in = nn.Linear(latent, width)
        self.text_in = nn.Linear(text, width)
        self.time = Embed(256, width)
        self.guidance = Embed(256, width)
        self.pooled = Embed(pooled, width)
        self.doubles = nn.ModuleList(DoubleBlock(width, heads) for _ in range(double))
        self.singles = nn.ModuleList(SingleBlock(width, heads) for _ in range(single))
        self.final = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.out = nn.Linear(width, latent)

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        pooled: Tensor,
        time: Tensor,
        guidance: Tensor,
        image_places: Tensor,
        text_places: Tensor,
    ) -> Tensor:
        """Predict the velocity, of the shape of ``image``.

        Args:
            image: packed latents (batch, tokens, latent).
            text: (batch, text tokens, text).
            pooled: (batch, pooled).
            time: (batch,), in [0, 1]; ``guidance`` likewise.
            guidance: strength (batch,).
            image_places: (batch, tokens, axes) positions; ``text_places`` likewise.
            text_places: (batch, text tokens, axes).
        """
        condition = self.time(self.waves(time)) + self.guidance(self.waves(guidance)) + self.pooled(pooled)
        angles = self.angles(torch.cat((text_places, image_places), dim=1))
        image, text = self.image_in(image), self.text_in(text)
        for double in self.doubles:
            image, text = double(image, text, condition, angles)
        tokens = torch.cat((text, image), dim=1)
        for single in self.singles:
            tokens = single(tokens, condition, angles)
        image = tokens[:, text.shape[1] :]
        shift, scale = self.final(F.silu(condition))[:, None].chunk(2, dim=-1)
        return self.out((1 + scale) * self.norm(image) + shift)  # type: ignore[no-any-return]

    def waves(self, t: Tensor) -> Tensor:
        """Map (batch,) to sines and cosines (batch, 256)."""
        rates = 10000.0 ** (-torch.arange(128, device=t.device, dtype=t.dtype) / 128)
        turns = 1000.0 * t[:, None] * rates
        return torch.cat((turns.cos(), turns.sin()), dim=-1)

    def angles(self, places: Tensor) -> Tensor:
        """Map positions (batch, tokens, axes) to rotary angles (batch, tokens, half a head)."""
        parts = []
        for axis, size in enumerate(self.axes):
            rates = 10000.0 ** (-torch.arange(0, size, 2, device=places.device, dtype=places.dtype) / size)
            parts.append(places[..., axis, None] * rates)
        return torch.cat(parts, dim=-1)


def inputs(image: int, text: int = 512, batch: int = 2, latent: int = 64, width: int = 4096) -> tuple[Tensor, ...]:
    """Return meta arguments of the forward: ``image`` and ``text`` tokens, of ``latent`` and ``width`` channels."""
    shapes = ((batch, image, latent), (batch, text, width), (batch, 768), (batch,), (batch,))
    return tuple(torch.empty(shape, device="meta") for shape in (*shapes, (batch, image, 3), (batch, text, 3)))
