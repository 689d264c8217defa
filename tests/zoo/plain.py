"""Plain models of other kinds than transformers': convolutions, vision, diffusion; each small, with its inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, tuple[Any, ...]]

PLAIN: dict[str, Callable[[], Made]] = {}


def plain(model_type: str) -> Made:
    """Return a model in eval mode, random from a fixed seed, and positional arguments on which it runs."""
    torch.manual_seed(0)
    model, inputs = PLAIN[model_type]()
    return model.eval(), inputs


def _kind(name: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def keep(make: Callable[[], Made]) -> Callable[[], Made]:
        PLAIN[name] = make
        return make

    return keep


class ConvBlock(nn.Module):
    """An inverted bottleneck: widen, filter each channel alone, narrow."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Conv2d(width, inner, 1, bias=False), nn.Conv2d(inner, width, 1, bias=False)
        self.each = nn.Conv2d(inner, inner, 3, padding=1, groups=inner, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(inner), nn.BatchNorm2d(inner), nn.BatchNorm2d(width)])

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.norms[0](self.widen(x)))
        y = F.relu6(self.norms[1](self.each(y)))
        out: Tensor = x + self.norms[2](self.narrow(y))
        return out


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(ConvBlock(16, 64), ConvBlock(16, 64))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    """ResNet's: narrow, filter, widen, each with a batch norm; a projection where the stride asks for one."""

    def __init__(self, width: int, inner: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.down = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.down(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.stages = nn.Sequential(Bottleneck(16, 16, 64, 1), Bottleneck(64, 32, 128, 2))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = F.adaptive_avg_pool2d(self.stages(x), 1).flatten(1)
        return self.head(x)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Self- or cross-attention with separate projections."""

    def __init__(self, width: int, heads: int, context: int | None = None) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = (nn.Linear(context or width, width) for _ in range(2))

    def forward(self, x: Tensor, context: Tensor | None = None, causal: bool = False) -> Tensor:
        source = x if context is None else context
        q, k, v = (
            p(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for p, y in ((self.q, x), (self.k, source), (self.v, source))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))  # type: ignore[no-any-return]


class VitBlock(nn.Module):
    """Pre-norm, with a learned scale of each branch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads), Mlp(width, 4 * width)
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), 0.1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1 * self.attention(self.norm1(x))
        return x + self.scale2 * self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Vit(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.Sequential(VitBlock(width, 4), VitBlock(width, 4))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])  # type: ignore[no-any-return]


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens, self.over_channels = Mlp(tokens, 32), Mlp(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norm2(x))  # type: ignore[no-any-return]


class Mixer(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(16, width), MixerBlock(16, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]


def time_embedding(steps: Tensor, width: int) -> Tensor:
    """Return sines and cosines of ``steps``, shape (batch,), as (batch, width)."""
    rates = torch.exp(-torch.arange(width // 2, device=steps.device) / (width // 2))
    angles = steps[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class ResBlock(nn.Module):
    """A U-Net's: group norms, two convolutions, the time added to the channels between them."""

    def __init__(self, width: int, out: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, width), nn.Conv2d(width, out, 3, padding=1)
        self.time = nn.Linear(time, out)
        self.norm2, self.conv2 = nn.GroupNorm(4, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(width, out, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))  # type: ignore[no-any-return]


class SpatialBlock(nn.Module):
    """Attention over pixels, then to a text."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.inner, self.cross = Attention(width, 4), Attention(width, 4, context)
        self.mlp = Mlp(width, 4 * width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y = self.norm(x).flatten(2).transpose(1, 2)
        y = y + self.inner(self.norms[0](y))
        y = y + self.cross(self.norms[1](y), context)
        y = y + self.mlp(self.norms[2](y))
        return x + y.transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]


class UNet(nn.Module):
    def __init__(self, width: int = 16, context: int = 24) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, 64))
        self.start = nn.Conv2d(4, width, 3, padding=1)
        self.down1, self.shrink = ResBlock(width, width, 64), nn.Conv2d(width, width, 3, 2, 1)
        self.down2, self.middle = ResBlock(width, 2 * width, 64), SpatialBlock(2 * width, context)
        self.grow, self.up = nn.Conv2d(2 * width, width, 3, padding=1), ResBlock(2 * width, width, 64)
        self.norm, self.end = nn.GroupNorm(4, width), nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x: Tensor, steps: Tensor, context: Tensor) -> Tensor:
        time = self.time(time_embedding(steps, self.width))
        wide = self.down1(self.start(x), time)
        deep = self.middle(self.down2(self.shrink(wide), time), context)
        grown = self.grow(F.interpolate(deep, scale_factor=2.0, mode="nearest"))
        return self.end(F.silu(self.norm(self.up(torch.cat([grown, wide], 1), time))))  # type: ignore[no-any-return]


class DitBlock(nn.Module):
    """Norms without weights; shift, scale and gate of each branch come from the condition (adaLN)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.attention, self.mlp = Attention(width, 4), Mlp(width, 4 * width)
        self.condition = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.condition(F.silu(condition))[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)  # type: ignore[no-any-return]


class Dit(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.patches, self.labels = nn.Linear(16, width), nn.Embedding(12, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([DitBlock(width), DitBlock(width)])
        self.norm, self.end = nn.LayerNorm(width, elementwise_affine=False), nn.Linear(width, 16)

    def forward(self, x: Tensor, steps: Tensor, labels: Tensor) -> Tensor:
        condition = self.time(time_embedding(steps, self.width)) + self.labels(labels)
        x = self.patches(x)
        for block in self.blocks:
            x = block(x, condition)
        return self.end(self.norm(x))  # type: ignore[no-any-return]


class CharBlock(nn.Module):
    """Post-norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width, 4), Mlp(width, 4 * width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, causal=True))
        return self.norm2(x + self.mlp(x))  # type: ignore[no-any-return]


class CharModel(nn.Module):
    """Predicts the next character; the table serves as the head."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(96, width)
        self.positions = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.Sequential(CharBlock(width), CharBlock(width))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.positions[: ids.shape[1]]
        return F.linear(self.blocks(x), self.table.weight)


def _image(size: int = 16, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, size, size)


@_kind("conv net")
def _conv_net() -> Made:
    return ConvNet(), (_image(),)


@_kind("resnet")
def _resnet() -> Made:
    return ResNet(), (_image(32),)


@_kind("vit")
def _vit() -> Made:
    return Vit(), (_image(),)


@_kind("mixer")
def _mixer() -> Made:
    return Mixer(), (_image(),)


@_kind("u-net")
def _unet() -> Made:
    return UNet(), (_image(8, 4), torch.tensor([3.0, 7.0]), torch.randn(2, 5, 24))


@_kind("dit")
def _dit() -> Made:
    return Dit(), (torch.randn(2, 9, 16), torch.tensor([3.0, 7.0]), torch.tensor([1, 2]))


@_kind("char model")
def _char_model() -> Made:
    return CharModel(), (torch.randint(0, 96, (2, 11)),)
