"""Where values change state: inside code, around means, behind lone matrices, over writes in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from simulate import same_on_all, simulated
from torch import Tensor, nn

from autoshard.api import plan as make_plan
from autoshard.executor.execute import apply, make_mesh
from autoshard.plans import Plan
from autoshard.proving.verification import verify

X = (torch.zeros(2, 7, 32),)


class Bare(nn.Module):
    """Weights without modules of their own, and a residual around them: no boundary can carry a conversion."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 8, 32) * 0.2)
        self.down = nn.Parameter(torch.randn(32, 4, 8) * 0.2)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.einsum("bsd,hed->bshe", x, self.up)
        y = torch.einsum("bshe,dhe->bsd", F.gelu(h), self.down)
        return self.norm(x + y)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Norms before and behind, which need their values whole."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.LayerNorm(32), inner, nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))  # type: ignore[no-any-return]


class FullNorm(nn.Module):
    """A norm over all heads together, spelt out."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)
        self.weight = nn.Parameter(torch.rand(48))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return self.down(F.silu(h))  # type: ignore[no-any-return]


class Latent(nn.Module):
    """Low-rank keys and values, and a rope part that all heads share: the region begins in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv_a = nn.Linear(32, 4 * 12), nn.Linear(32, 16 + 4)
        self.norm, self.kv_b, self.o = nn.LayerNorm(16), nn.Linear(16, 4 * 16), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, 12)).transpose(1, 2)
        latent, rope = self.kv_a(x).split([16, 4], dim=-1)
        k, v = self.kv_b(self.norm(latent)).unflatten(-1, (-1, 16)).transpose(1, 2).split([8, 8], dim=-1)
        key = torch.empty(*k.shape[:-1], 12, dtype=k.dtype)
        key[..., :8] = k
        key[..., 8:] = rope[:, None]
        y = F.scaled_dot_product_attention(q, key, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Slopes(nn.Module):
    """A bias for each head in a buffer."""

    slopes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(32, 3 * 32), nn.Linear(32, 32)
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        far = torch.arange(x.shape[1], dtype=x.dtype)
        scores = q @ k.transpose(-1, -2) / 8**0.5 - self.slopes[:, None, None] * far
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Unlike(nn.Module):
    """What is done to a partial sum is not linear in it, or would count on every rank: the sum comes first."""

    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.then = nn.Linear(32, 48), nn.Parameter(torch.randn(32, 48) * 0.2), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(F.linear(F.relu(self.up(x)), self.down))


class ScaledNorm(nn.Module):
    """Scales before it norms: a partial sum would pass through the first, not through the second."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def kernel(module: Registered, x: Tensor) -> Tensor:
    return module.norm(F.linear(F.relu(F.linear(x, module.up)), module.down))  # type: ignore[no-any-return]


class Registered(nn.Module):
    """Its code is a function out of a table: no copy of it can be the module's own, so nothing converts in it."""

    table: ClassVar = {"plain": kernel}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(48, 32) * 0.2), nn.Parameter(torch.randn(32, 48) * 0.2)
        self.norm = ScaledNorm()

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.table["plain"]
        return chosen(self, x)


def onto_written(y: Tensor) -> Tensor:
    out = torch.zeros_like(y)
    out[..., :2] = 1.0
    return out.add_(y)


UNLIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "a number is added": lambda y: y + 1.0,
    "a number is written": lambda y: y.scatter(-1, torch.zeros(*y.shape[:-1], 1, dtype=torch.long), 2.0),
    "it is rounded": lambda y: y - torch.div(y, 0.1, rounding_mode="floor"),
    "it becomes an integer": lambda y: y + y.to(torch.long).to(y.dtype),
    "it is added to zeros with numbers in them": onto_written,
    "it divides": lambda y: 1.0 / (2.0 + y * y),
}


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bare": lambda: Block(Bare()),
    "full norm": lambda: Block(FullNorm()),
    "latent": lambda: Block(Latent()),
    "slopes": lambda: Block(Slopes()),
    "registered": lambda: Block(Registered()),
    **{name: partial(lambda then: Block(Unlike(then)), then) for name, then in UNLIKE.items()},
}
CUT = {
    "bare": ("inner.up", "inner.down"),
    "full norm": ("inner.up.weight", "inner.weight", "inner.down.weight"),
    "latent": ("inner.q.weight", "inner.kv_b.weight", "inner.o.weight"),
    "slopes": ("inner.qkv.weight", "inner.o.weight"),
    "registered": ("inner.up", "inner.down"),
    **dict.fromkeys(UNLIKE, ("inner.up.weight", "inner.down")),
}


def planned(name: str) -> tuple[nn.Module, Plan]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, make_plan(model, world=2, tp=2, example_inputs=X)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_cut_and_exact(name: str) -> None:
    model, plan = planned(name)
    assert all(plan.parameters[fqn].tp_dim is not None for fqn in CUT[name]), str(plan)
    styles = {plan.modules[fqn.rpartition(".")[0]].style for fqn in CUT[name]}
    assert "colwise_gather_output" not in styles
    proof = verify(model, plan, example_inputs=X)
    assert proof.ok, str(proof)


@pytest.mark.parametrize(("name", "kind"), [("bare", "R->V"), ("bare", "P->R"), ("full norm", "A->V")])
def test_a_conversion_inside_code_is_needed(name: str, kind: str) -> None:
    model, plan = planned(name)
    module = plan.modules["inner"]
    left = tuple(one for one in module.rewrites if repr(kind) not in one.after)
    assert len(left) < len(module.rewrites)
    spoiled = dataclasses.replace(plan, modules={**plan.modules, "inner": dataclasses.replace(module, rewrites=left)})
    assert not verify(model, spoiled, example_inputs=X).ok


def test_a_sum_is_reduced_where_a_norm_that_scales_first_takes_it() -> None:
    model, plan = planned("registered")
    assert plan.modules["inner.norm"].inputs == {"x": "P->R"}
    modules = {fqn: module for fqn, module in plan.modules.items() if fqn != "inner.norm"}
    assert not verify(model, dataclasses.replace(plan, modules=modules), example_inputs=X).ok


def test_a_rope_part_enters_with_the_latent() -> None:
    _, plan = planned("latent")
    assert plan.modules["inner.kv_a"].outputs[""].endswith("->V")
    assert plan.parameters["inner.norm.weight"].grad_sum is not None


def test_a_buffer_is_cut_with_its_heads() -> None:
    model, plan = planned("slopes")
    assert plan.buffers["inner.slopes"].tp_dim == 0
    whole = dataclasses.replace(plan.buffers["inner.slopes"], tp_dim=None, local_shape=(4,), tp_copies=2)
    spoiled = dataclasses.replace(plan, buffers={"inner.slopes": whole})
    assert not verify(model, spoiled, example_inputs=X).ok


class Pictures(nn.Module):
    """Patches and a table of words, side by side: each is cut alone."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words, self.norm = nn.Conv2d(3, 32, 4, 4), nn.Embedding(11, 32), nn.LayerNorm(32)

    def forward(self, image: Tensor, ids: Tensor) -> Tensor:
        tokens = torch.cat([self.patches(image).flatten(2).transpose(1, 2), self.words(ids)], 1)
        return self.norm(tokens)  # type: ignore[no-any-return]


def test_lone_matrices_are_gathered() -> None:
    inputs = (torch.randn(2, 3, 8, 8), torch.randint(0, 11, (2, 5)))
    model = Pictures()
    plan = make_plan(model, world=2, tp=2, example_inputs=inputs)
    assert plan.modules["patches"].outputs == {"": "S(-3)->R"}
    assert plan.modules["words"].outputs == {"": "S(-1)->R"}
    assert plan.parameters["words.weight"].tp_dim == 1
    assert verify(model, plan, example_inputs=inputs).ok


class Adapted(nn.Module):
    """A big matrix between norms, and a small detour around it."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.big, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.a, self.b = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.norm(self.big(x) + self.b(self.a(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("pinned", [True, False])
def test_small_cuts_that_do_not_pay_are_left_unless_tp_is_pinned(pinned: bool) -> None:
    with torch.device("meta"):
        model = Adapted(4096, 8)
    tiny = {} if pinned else {"memory": 1e-3}
    tp = {"tp": 2} if pinned else {"dp_shard": 1, "dp_replicate": 1}
    plan = make_plan(model, world=2, example_inputs=(torch.zeros(2, 7, 4096),), **tp, **tiny)  # type: ignore[arg-type]
    assert plan.mesh.tp == 2
    assert plan.parameters["big.weight"].tp_dim == 0
    assert (plan.parameters["a.weight"].tp_dim is not None) == pinned
    assert pinned or "products for each element moved" in plan.parameters["a.weight"].why


class OwnHead(nn.Module):
    """Its own code makes the logits; given labels, which the trace is not, it makes a loss of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        h = self.table(ids)
        h = h + self.down(torch.relu(self.up(h)))
        logits = F.linear(h, self.table.weight)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_what_the_models_own_code_returns_is_whole_for_code_that_did_not_run() -> None:
    torch.manual_seed(0)
    model, ids = OwnHead().double(), torch.randint(0, 32, (2, 7))
    want = float(model(ids, labels=ids).detach())
    plan = make_plan(model, world=2, tp=2, example_inputs=(ids,))
    assert any("F.linear(h, self.table.weight)" in one.before for _, m in plan.module_plans() for one in m.rewrites)
    with simulated(2):
        apply(model, plan, make_mesh(plan, "cpu"))
        assert float(same_on_all(model(ids, labels=ids)).detach()) == pytest.approx(want, rel=1e-12)


class Positioned(nn.Module):
    """An attention that adds positions to what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + positions
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Queries(nn.Module):
    """Learnt positions, which regions and whole values take; the first values are made of nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(7, 32))
        self.first, self.second, self.norm = Positioned(), Positioned(), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        positions = self.positions.expand(x.shape[0], -1, -1)
        y = torch.zeros_like(positions)
        y = y + self.first(y, positions)
        y = y + self.second(self.norm(y + x), positions)
        return self.norm(y + positions)  # type: ignore[no-any-return]


def queries() -> Plan:
    return make_plan(Queries(), world=2, tp=2, example_inputs=X)


def test_a_parameter_used_on_shares_and_on_whole_values_enters_as_activations_do() -> None:
    plan = queries()
    assert plan.coverage.matmul_flops == 1
    assert plan.parameters["positions"].grad_sum is None
    for name in ("first", "second"):
        assert plan.parameters[f"{name}.q.weight"].tp_dim == 0
        assert plan.parameters[f"{name}.o.weight"].tp_dim == 1
    proof = verify(Queries(), plan, example_inputs=X)
    assert proof.ok, proof


def test_a_parameter_that_enters_nowhere_has_a_wrong_gradient() -> None:
    data = queries().to_dict()
    assert data["modules"]["first.q"]["inputs"] == {"input": "R->V"}
    data["modules"]["first.q"] |= {"inputs": {}, "share": {}}
    proof = verify(Queries(), data, example_inputs=X)
    assert not proof.ok and "positions" in proof.wrong, proof


class Averaging(nn.Module):
    """An attention of torch's that averages its weights over the heads, which nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.norm = nn.MultiheadAttention(32, 4, batch_first=True), nn.LayerNorm(32)
        self.probe = nn.Parameter(torch.randn(1, 1, 32))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.attend(self.probe.repeat(x.shape[0], 1, 1), x, x)[0])  # type: ignore[no-any-return]


def test_heads_are_cut_first_where_an_average_over_them_is_not_used() -> None:
    plan = make_plan(Averaging(), world=2, tp=2, example_inputs=X)
    assert plan.parameters["attend.in_proj_weight"].read == "local"
    proof = verify(Averaging(), plan, example_inputs=X)
    assert proof.ok, proof
    data = plan.to_dict()
    data["modules"]["attend.out_proj"]["outputs"] = {}
    assert not verify(Averaging(), data, example_inputs=X).ok
