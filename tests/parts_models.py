"""A model with weights that are cut in parts or read in slices, and its plan written by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoshard.plans import Coverage, GradSum, Mesh, ModulePlan, Plan, Slices, TensorPlan, Unit

HIDDEN, HEAD, INNER, EXPERTS = 8, 2, 12, 3
HEADS, KV_HEADS = 8, 4
Q, KV = HEADS * HEAD, KV_HEADS * HEAD
WIDE = 4


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads second to last of (batch, sequence, heads, size); returns (batch, sequence, heads * size)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    answer = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return answer.transpose(1, 2).flatten(2)


class Fused(nn.Module):
    """One projection of 8 query heads, 4 key heads and 4 value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, Q + 2 * KV)
        self.o = nn.Linear(Q, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        share = y.shape[-1] // 4
        q, k, v = (part.unflatten(-1, (-1, HEAD)) for part in y.split([2 * share, share, share], -1))
        answer: Tensor = self.o(attend(q, k, v))
        return answer


class Mixed(nn.Module):
    """Four query heads with a scale each, of two groups with an offset each, one key and one value head."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 6 * WIDE)
        self.scale = nn.Parameter(torch.ones(4))
        self.offset = nn.Parameter(torch.ones(2, WIDE))
        self.o = nn.Linear(4 * WIDE, HIDDEN, bias=False)
        self.register_buffer("slopes", torch.linspace(0.1, 0.8, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        q, k, v = (p.unflatten(-1, (-1, WIDE)) for p in y.split([y.shape[-1] - 2 * WIDE, WIDE, WIDE], -1))
        offset = self.offset
        first, second = self.slopes.chunk(2)
        bend = (first * second)[:, None]
        q = (q + offset.repeat_interleave(q.shape[2] // offset.shape[0], 0)) * self.scale[:, None] * bend
        answer: Tensor = self.o(attend(q.to(v.dtype), k, v))
        return answer


class Feed(nn.Module):
    """Gate and up in one transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(HIDDEN, 2 * INNER))
        self.bias = nn.Parameter(torch.empty(2 * INNER))
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (x @ self.weight + self.bias).chunk(2, -1)
        answer: Tensor = self.down(F.silu(gate) * up)
        return answer


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, INNER))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.einsum("bsh,eih->besi", x, self.gate_up).chunk(2, -1)
        return torch.einsum("besi,ehi->bsh", F.silu(gate) * up, self.down)


class Model(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.fused, self.mixed, self.experts = Fused(), Mixed(), Experts()
        self.feed, self.again = Feed(), Feed()
        self.again.weight = self.feed.weight
        generator = torch.Generator().manual_seed(seed)
        self.double()
        for p in self.parameters():
            nn.init.normal_(p, std=0.4, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for block in (self.fused, self.mixed, self.feed, self.experts, self.again):
            x = x + block(x)
        return x


def _cuts(tp: int) -> dict[str, dict[str, Any]]:
    qkv: dict[str, Any] = {"tp_dim": 0, "tp_parts": ((0, Q), (Q, KV), (Q + KV, KV))}
    two = ((0, INNER), (INNER, INNER))
    mixed: Slices = ((0, 4 * WIDE, tp), (4 * WIDE, WIDE, 1), (5 * WIDE, WIDE, 1))
    return {
        "fused.qkv.weight": qkv,
        "fused.qkv.bias": qkv,
        "fused.o.weight": {"tp_dim": 1},
        "fused.o.bias": {"read": "first_rank"},
        "mixed.qkv.weight": seen(mixed, tp),
        "mixed.qkv.bias": seen(mixed, tp),
        "mixed.scale": seen(((0, 4, tp),), tp),
        "mixed.offset": seen(((0, 2, 2),), tp),
        "mixed.o.weight": {"tp_dim": 1},
        "mixed.slopes": {"tp_dim": 0, "tp_parts": ((0, 4), (4, 4)), "fsdp_dim": None},
        **{f"{name}.weight": {"tp_dim": 1, "tp_parts": two} for name in ("feed", "again")},
        **{f"{name}.bias": {"tp_dim": 0, "tp_parts": two} for name in ("feed", "again")},
        **{f"{name}.down.weight": {"tp_dim": 1} for name in ("feed", "again")},
        **{f"{name}.down.bias": {"read": "first_rank"} for name in ("feed", "again")},
        "experts.gate_up": {"tp_dim": 1, "tp_parts": two},
        "experts.down": {"tp_dim": 2},
    }


def seen(slices: Slices, tp: int, dim: int = 0) -> dict[str, Any]:
    return {"read": "slice", "slices": slices, "slice_dim": dim, "grad_sum": GradSum(tp)}


def plan_of(model: Model, mesh: Mesh, **changes: dict[str, Any]) -> Plan:
    """The plan; ``changes`` are further fields of tensors, their names with ``__`` for dots."""
    cuts = _cuts(mesh.tp) if mesh.tp > 1 else {}
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    made = {}
    for name, tensor in tensors.items():
        fields = {**cuts.get(name, {}), **changes.get(name.replace(".", "__"), {})}
        shape = tuple(tensor.shape)
        plain = TensorPlan(
            shape,
            "float64",
            None,
            None,
            1,
            None,
            0 if mesh.data > 1 else None,
            shape,
            "",
            trainable="slopes" not in name,
        )
        plan = dataclasses.replace(plain, **fields)
        made[name] = dataclasses.replace(plan, tp_copies=mesh.tp if plan.tp_dim is None else 1)
    made["again.weight"] = dataclasses.replace(made["again.weight"], tied_to="feed.weight")
    blocks = ("fused", "mixed", "feed", "experts", "again")
    whole = ModulePlan("region", {"x": "R->V"}, {"": "P->R"})
    return Plan(
        mesh=mesh,
        parameters={name: one for name, one in made.items() if name != "mixed.slopes"},
        buffers={"mixed.slopes": made["mixed.slopes"]},
        modules=dict.fromkeys(blocks, whole) if mesh.tp > 1 else {},
        units=(Unit("fused", 0, 0), Unit("mixed", 0, 0), Unit("experts", 0, 0), Unit("", 0, 0)),
        memory_bytes={},
        collectives=(),
        coverage=Coverage(0.0, 0.0),
    )
