"""A plain Llama under the plan that torch's tutorial writes by hand and under ours, and the work of one timed rank.

The hand plan is the one of https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html without sequence
parallelism: ``ColwiseParallel`` for q, k, v, gate and up, ``RowwiseParallel`` for o, down and the embedding, and a head
whose logits are gathered.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autoshard
from autoshard.plans import Plan

BATCH, LENGTH, VOCABULARY, HEAD_DIM, LAYERS = 2, 64, 2048, 16, 4
#: hidden widths of the models
WIDTHS = (256, 384, 512, 768, 1024)


class Norm(nn.Module):
    """Root mean square norm with a learned scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-6)


class Attention(nn.Module):
    """Causal attention with half as many kv heads as heads; any number of heads may be local."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix positions."""
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, s, -1, HEAD_DIM).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """Gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix features."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP with norms before and residuals around."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), Mlp(width)
        self.norm1, self.norm2 = Norm(width), Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Run one layer."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm = Norm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary)."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def by_hand(model: nn.Module) -> nn.Module:
    """Apply the tutorial's plan."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    styles: dict[str, Any] = {"embedding": RowwiseParallel(input_layouts=Replicate())}
    styles["head"] = ColwiseParallel(output_layouts=Replicate())
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        styles[f"blocks.*.{name}"] = ColwiseParallel()
    for name in ("attention.o", "mlp.down"):
        styles[f"blocks.*.{name}"] = RowwiseParallel()
    return parallelize_module(model, mesh, styles)


@dataclass(frozen=True)
class Timed:
    """One step: seconds until all ranks had gradients, seconds until all had stepped, and the loss."""

    gradients: float
    step: float
    loss: float


class Trained:
    """A model and its optimizer on this rank."""

    def __init__(self, width: int, plan: Plan | None) -> None:
        torch.manual_seed(0)
        model = Decoder(width)
        if plan is None:
            self.model = by_hand(model)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        else:
            self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
            self.model = autoshard.parallelize(model, plan, optimizer=self.optimizer)
        self.ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))

    def step(self) -> Timed:
        """Train once, begun together with the other ranks."""
        dist.barrier()
        start = time.perf_counter()
        logits = self.model(self.ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), self.ids[:, 1:].flatten())
        loss.backward()
        dist.barrier()
        gradients = time.perf_counter() - start
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.barrier()
        return Timed(gradients, time.perf_counter() - start, float(loss))


def measure(width: int, plan: dict[str, Any], pairs: int) -> list[tuple[Timed, Timed]]:
    """Return pairs of steps, by hand and ours in turn; both must have lost the same by the end."""
    torch.set_num_threads(1)
    hand, ours = Trained(width, None), Trained(width, Plan.from_dict(plan))
    for _ in range(2):
        hand.step(), ours.step()
    found = []
    for index in range(pairs):
        # whoever comes first may find a colder cache: take turns
        first, second = (hand, ours) if index % 2 == 0 else (ours, hand)
        one, other = first.step(), second.step()
        found.append((one, other) if first is hand else (other, one))
    by_hand, inferred = (one.loss for one in found[-1])
    assert abs(by_hand - inferred) < 1e-3, f"by hand and ours trained apart: {by_hand}, {inferred}"
    return found
