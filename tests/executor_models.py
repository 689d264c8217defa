"""A small decoder with every case the executor knows, and its plan written by hand."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoshard.patterns import fold
from autoshard.plans import Coverage, GradSum, Mesh, ModulePlan, Plan, TensorPlan, Unit


@dataclass(frozen=True)
class Config:
    """Sizes, and the switches that turn cases on."""

    vocab: int = 32
    hidden: int = 16
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 6
    inner: int = 24
    layers: int = 2
    padding: int | None = 5
    repeats: int = 1
    checkpointing: bool = False
    scalars: bool = True
    slopes: bool = True
    dtype: torch.dtype = torch.float64
    seed: int = 0


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)
        return y


class Attention(nn.Module):
    """Norm and residual inside: the region cannot be entered at the module's own boundary."""

    slopes: Tensor

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.norm = Norm(c.hidden)
        self.q = nn.Linear(c.hidden, c.heads * c.head_dim, bias=True)
        self.k = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o = nn.Linear(c.heads * c.head_dim, c.hidden, bias=True)
        self.q_norm = Norm(c.head_dim)
        self.k_norm = Norm(c.head_dim)
        if c.scalars:
            self.temperature = nn.Parameter(torch.tensor(0.7))
        if c.slopes:
            self.register_buffer("slopes", torch.linspace(0.1, 0.5, c.heads))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        h = self.norm(x)
        q = self.q_norm(self.q(h).view(b, s, -1, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k(h).view(b, s, -1, self.head_dim)).transpose(1, 2)
        v = self.v(h).view(b, s, -1, self.head_dim).transpose(1, 2)
        if hasattr(self, "temperature"):
            q = q * self.temperature
        steps = torch.arange(s)
        far = (steps[None, :] - steps[:, None]).to(x.dtype)
        bias = self.slopes[:, None, None] * far if hasattr(self, "slopes") else 0 * far
        mask = bias.masked_fill(far > 0, -math.inf)
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        y: Tensor = x + self.o(a.transpose(1, 2).reshape(b, s, -1))
        return y


class Feed(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(c.hidden, c.inner)
        self.up = nn.Linear(c.hidden, c.inner, bias=False)
        self.down = nn.Linear(c.inner, c.hidden)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x) * self.gain)
        return y


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.attention = Attention(c)
        self.norm = Norm(c.hidden)
        self.feed = Feed(c)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x)
        y: Tensor = x + self.feed(x=self.norm(x))
        return y


class Decoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        torch.manual_seed(c.seed)
        self.config = c
        self.table = nn.Embedding(c.vocab, c.hidden, padding_idx=c.padding)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = Norm(c.hidden)
        self.head = nn.Linear(c.hidden, c.vocab, bias=False)
        if c.scalars:
            self.scale = nn.Parameter(torch.tensor(1.3))
        for p in self.parameters():
            nn.init.normal_(p, mean=1.0 if p.dim() < 2 else 0.0, std=0.3)
        self.head.weight = self.table.weight
        self.to(c.dtype)

    def block(self, index: int) -> Block:
        """One of the blocks, typed."""
        block = self.blocks[index]
        assert isinstance(block, Block)
        return block

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for _ in range(self.config.repeats):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.config.checkpointing else block(x)
        x = self.norm(x)
        logits: Tensor = self.head(x * self.scale if self.config.scalars else x)
        return logits


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Next-token loss, float64 scalar; logits (batch, sequence, vocab), ids (batch, sequence)."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def cut_of(name: str) -> int | None:
    """The dim that tp cuts, by the test model's names."""
    owner, _, leaf = name.rpartition(".")
    if owner.endswith((".q", ".k", ".v", ".gate", ".up")) or owner in ("table", "head") or leaf == "slopes":
        return 0
    if owner.endswith((".o", ".down")) and leaf == "weight":
        return 1
    return None


def is_partial(name: str) -> bool:
    """Whether a whole parameter is used on cut values."""
    return name.rpartition(".")[0].endswith(("q_norm", "k_norm")) or name.endswith(("temperature", "gain"))


def tensor_plan(name: str, tensor: Tensor, mesh: Mesh, tied_to: str | None = None) -> TensorPlan:
    dim = cut_of(name) if mesh.tp > 1 else None
    first = dim is None and name.endswith((".o.bias", ".down.bias")) and mesh.tp > 1
    local = [size // (mesh.tp if d == dim else 1) for d, size in enumerate(tensor.shape)]
    return TensorPlan(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        tp_dim=dim,
        tp_parts=None,
        tp_copies=1 if dim is not None else mesh.tp,
        grad_sum=GradSum(mesh.tp) if mesh.tp > 1 and is_partial(name) else None,
        fsdp_dim=1 if name.endswith("down.weight") and mesh.data > 1 else None,
        local_shape=tuple(local),
        why="",
        read="first_rank" if first else "local",
        trainable=tensor.requires_grad,
        tied_to=tied_to,
    )


def modules_of(model: Decoder) -> dict[str, ModulePlan]:
    layers = f"blocks.{fold(list(range(len(model.blocks))))}."
    plans = {
        "table": ModulePlan("embedding_rowwise", outputs={"": "P->R"}, lookup="input"),
        "head": ModulePlan("colwise_gather_output", {"input": "R->V"}, {"": "S(2)->R"}),
        layers + "attention.o": ModulePlan("rowwise", outputs={"": "P->R"}),
        layers + "feed": ModulePlan("region", inputs={"x": "R->V"}),
        layers + "feed.down": ModulePlan("rowwise", outputs={"": "P->R"}),
    }
    for name in ("q", "k", "v"):
        entry = {"input": layers + "attention.h"}
        plans[layers + "attention." + name] = ModulePlan("colwise", {"input": "R->V"}, share=entry)
    return plans


def decoder_plan(model: Decoder, mesh: Mesh, spoil: str | None = None) -> Plan:
    """The hand plan; ``spoil`` leaves one thing out."""
    plan = Plan(
        mesh=mesh,
        parameters={
            name: tensor_plan(name, p, mesh, "table.weight" if name == "head.weight" else None)
            for name, p in model.named_parameters(remove_duplicate=False)
        },
        buffers={name: tensor_plan(name, b, mesh) for name, b in model.named_buffers()},
        modules=modules_of(model) if mesh.tp > 1 else {},
        units=(Unit(f"blocks.{fold(list(range(len(model.blocks))))}", 0, 0), Unit("head", 0, 0), Unit("", 0, 0)),
        memory_bytes={},
        collectives=(),
        coverage=Coverage(0.0, 0.0),
    )
    return spoiled(plan, spoil) if spoil else plan


def spoiled(plan: Plan, how: str) -> Plan:
    if how == "grad_sum":
        changed: dict[str, Any] = {
            n: dataclasses.replace(p, grad_sum=None if "q_norm" in n else p.grad_sum)
            for n, p in plan.parameters.items()
        }
    elif how == "bias":
        changed = {n: dataclasses.replace(p, read="local") for n, p in plan.parameters.items()}
    else:
        modules = {n: dataclasses.replace(m, inputs={}) if n.endswith("feed") else m for n, m in plan.modules.items()}
        return dataclasses.replace(plan, modules=modules)
    return dataclasses.replace(plan, parameters=changed)


@dataclass
class Report:
    """Largest relative errors of one run."""

    outputs: float = 0.0
    losses: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    parameters: float = 0.0
    norms: float = 0.0

    @property
    def worst(self) -> float:
        return max(self.outputs, self.losses, self.parameters, self.norms, *self.gradients.values(), 0.0)
