"""Hand-written plans that tests of the report, the command line and the plan file share; no torch."""

from __future__ import annotations

import dataclasses

from autoshard.plans import (
    Collective,
    Coverage,
    GradSum,
    Mesh,
    MeshChoice,
    ModulePlan,
    PassTime,
    Plan,
    Refusal,
    TensorPlan,
    Unit,
)

HIDDEN, FFN, VOCAB, LAYERS = 4096, 14336, 128256, 4


def tensor(shape: tuple[int, ...], tp_dim: int | None, why: str, tp: int = 2, **changes: object) -> TensorPlan:
    local = tuple(size // tp if dim == tp_dim else size for dim, size in enumerate(shape))
    plain = TensorPlan(
        shape=shape,
        dtype="bfloat16",
        tp_dim=tp_dim,
        tp_parts=None,
        tp_copies=tp if tp_dim is None else 1,
        grad_sum=None,
        fsdp_dim=0,
        local_shape=local,
        why=why,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def decoder_plan() -> Plan:
    """A decoder with head-wise attention, a gated MLP, a per-head norm and a table and head cut by rows."""
    heads = "8 kv heads, 4 queries each, are independent"
    ffn = "14336 inner features are independent"
    parameters = {"embed.weight": tensor((VOCAB, HIDDEN), 0, "128256 rows are looked up one by one")}
    for layer in range(LAYERS):
        here = f"layers.{layer}"
        parameters |= {
            f"{here}.attention.query.weight": tensor((HIDDEN, HIDDEN), 0, heads),
            f"{here}.attention.key.weight": tensor((HIDDEN // 4, HIDDEN), 0, heads),
            f"{here}.attention.value.weight": tensor((HIDDEN // 4, HIDDEN), 0, heads),
            f"{here}.attention.query_norm.weight": tensor(
                (128,), None, "every rank applies it to its own heads only", grad_sum=GradSum(2)
            ),
            f"{here}.attention.output.weight": tensor((HIDDEN, HIDDEN), 1, heads),
            f"{here}.mlp.gate.weight": tensor((FFN, HIDDEN), 0, ffn),
            f"{here}.mlp.up.weight": tensor((FFN, HIDDEN), 0, ffn),
            f"{here}.mlp.down.weight": tensor((HIDDEN, FFN), 1, ffn),
            f"{here}.norm.weight": tensor((HIDDEN,), None, "normalises over the residual"),
        }
    parameters["head.weight"] = tensor((VOCAB, HIDDEN), 0, "each row gives one logit")
    all_layers = "layers.{0-3}"
    return Plan(
        model="Decoder",
        mesh=Mesh(dp_shard=4, tp=2),
        parameters=parameters,
        buffers={"slopes": tensor((32,), 0, "one slope for each head", dtype="float32", fsdp_dim=None)},
        modules={
            "embed": ModulePlan("embedding_rowwise", {}, {"": "P->R"}, "128256 rows, half of them here", {}, "tokens"),
            **{
                f"{all_layers}.attention.{name}": ModulePlan(
                    "colwise", {"x": "R->V"}, {}, heads, {"x": f"{all_layers}.attention.enter"}
                )
                for name in ("query", "key", "value")
            },
            f"{all_layers}.attention.output": ModulePlan("rowwise", {}, {"": "P->R"}, "sums over heads"),
            **{
                f"{all_layers}.mlp.{name}": ModulePlan("colwise", {"x": "R->V"}, {}, ffn, {"x": f"{all_layers}.mlp.in"})
                for name in ("gate", "up")
            },
            f"{all_layers}.mlp.down": ModulePlan("rowwise", {}, {"": "P->R"}, "sums over inner features"),
            "head": ModulePlan(
                "colwise_gather_output", {"x": "R->V"}, {"": "S(2)->R"}, "logits leave the model: they are gathered"
            ),
        },
        units=(Unit("layers.{0-3}", 9, 218_112_000), Unit("", 3, 1_050_681_344)),
        memory_bytes={
            "parameters": 2_147_000_000,
            "gradients": 2_147_000_000,
            "optimizer_state": 8_588_000_000,
            "gathered_units": 1_050_681_344,
            "activations": 3_221_225_472,
        },
        collectives=(
            Collective("tp", "all_reduce", 19, 19 << 24, "activation"),
            Collective("dp_shard", "all_gather", 11, 12 << 30, "parameter"),
            Collective("dp_shard", "reduce_scatter", 5, 6 << 30, "gradient"),
        ),
        coverage=Coverage(
            0.99982,
            1.0,
            (
                *((f"layers.{i}.norm.weight", 0.00004, "normalises over the residual") for i in range(LAYERS)),
                ("rotary", 0.00002, "an op without a rule: aten.unknown"),
            ),
        ),
        why_mesh="tp=2 was pinned; dp_shard takes the other 4 ranks",
        meshes=(
            MeshChoice(Mesh(dp_shard=4, tp=2), 17_153_906_816, "fits 80.0 GiB"),
            MeshChoice(Mesh(dp_replicate=4, tp=2), 60_129_542_144, "fits, but holds 4 copies"),
        ),
        assumptions=("attention_mask is not given", "traced in training mode"),
        warnings=("dropout p=0.1 draws different numbers on each tp rank",),
        refused=(Refusal("rotary", "decoder.py:41", "the index depends on data"),),
        times=(PassTime("trace", 1.25, "512 ops"), PassTime("factorise", 0.02, "9 factors")),
    )


def uncut_plan() -> Plan:
    """The same decoder on two tp ranks with nothing cut."""
    plan = decoder_plan()
    return dataclasses.replace(
        plan,
        mesh=Mesh(tp=2),
        parameters={
            name: tensor(one.shape, None, "replicated by an override") for name, one in plan.parameters.items()
        },
        buffers={},
        modules={},
        units=(),
        coverage=Coverage(0.0, 0.0, (("", 1.0, "replicated by an override"),)),
        collectives=(),
        meshes=(),
        warnings=(),
        refused=(),
        assumptions=(),
    )
