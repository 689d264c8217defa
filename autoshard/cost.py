"""What one training step needs and takes on one rank: the equations.

Every function here takes numbers or sympy symbols alike: what is evaluated is what ``explain --formula`` prints.

Symbols. Bytes, seconds, elements; all of one rank.

    B, T       sequences per data rank, tokens per sequence
    t, s, r    degrees of tp, dp_shard, dp_replicate
    u          an FSDP unit, in the order of forward; the root is the unit of what is in no other
    p, g, o    bytes of u's parameters, gradients and optimizer state, whole over dp_shard
    q, w       bytes of u's parameters as they are gathered, and of its gradients as they are reduced
    k, d, x    bytes of u's activations: kept for backward; of those, results of matmuls and attention; its arguments
    y          bytes backward of u needs at its worst moment beside those that are kept
    z          bytes of the root's whole gradients that are there before backward of any other unit: of the head, say
    v, c       elements of the logits, where the loss is computed outside of the model; bytes of it for each
    f, m, l    FLOPs of matmuls and attention, bytes moved, kernels, in one forward of u
    F, M       FLOP/s and bytes/s that the device sustains: ``MATMUL`` and ``MEMORY`` of its data sheet's
    n, b       ranks and payload bytes of a collective: the input of an all-reduce or reduce-scatter, or the output of
               an all-gather
    N          devices of a node; link and network: bytes/s one way of a device, ``NETWORK`` of the data sheet's

Memory.

    (1)  state       = sum over u of (p + o) / s                                    -> ``state_bytes``
    (2)  gradients   = sum over u of g / s                                          -> ``gradient_bytes``
    (3)  gathered    = q where s > 1 or the forward computes in another dtype       -> ``gathered_bytes``
    (4)  kept        = k; x + d under selective, x under full checkpointing of u    -> ``kept_bytes``
    (5)  at the loss = kept of all u + gathered root + c v                          -> ``at_the_loss``
    (6)  in u        = kept of all before u + k + y + z + gathered root, u and the one before it + w of the one
                       after it + g / s of all after it                             -> ``in_backward``
    (7)  at the step = 2 * gradients                                                -> ``at_the_step``
    (8)  peak        = (1) + the largest of (5), (6) for each u, and (7)            -> ``peak_bytes``

(5): a float32 cross-entropy keeps its log-probabilities and holds two gradients of them: c = 3 x 4 bytes an element.
Over logits that are cut, torch's ``loss_parallel`` works out the gradient in eager steps: its backward holds the
log-probabilities, a scatter of ones, the sum with the probabilities and its product: c = 4 x 4 bytes of 1/t of them.
(6): FSDP gathers the next unit while one computes, frees the buffer of a reduction behind the next one, and reduces the
root's gradients when all backward is done.
(7): a foreach optimizer holds one temporary as large as the gradients.

Communication. Ring algorithms (Thakur et al. 2005; NCCL's own accounting of bus bandwidth).

    (9)  all-gather, reduce-scatter = (n - 1) / n * b / bandwidth + (n - 1) * latency      -> ``ring_seconds``
    (10) all-reduce                 = twice (9)                                            -> ``ring_seconds``
    (11) an axis of n ranks, j apart: the node's link where n * j <= N; else min(link, max(1, N / j) * network),
         as each of the j groups of a node has its share of the network devices           -> ``bandwidth``

Compute.

    (12) forward   = f / F + m / M, at least l * ``LAUNCH``                         -> ``forward_seconds``
    (13) backward  = twice (12); plus (12) of what checkpointing runs again         -> ``compute_seconds``
    (14) optimizer = (2 * state + gradients) / M                                    -> ``optimizer_seconds``

In (12) a thin matmul falls behind by what it moves: cut over tp it moves the same rows for a part of the FLOPs.

    (15) step = (13) + tp's collectives + (14) + what data parallelism cannot hide  -> ``step_seconds``

Assumptions of (15): nothing hides tp's collectives, as the next op waits for them. FSDP's gathers and reductions run
beside (13), one unit ahead, but for the first gather and the last reduction. On a CPU nothing overlaps: gloo runs on
the cores that compute.

Constants that are no physics are ``MATMUL``, ``MEMORY``, ``NETWORK``, ``LAUNCH`` and ``MARGIN``, below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy

#: (empirical) share of a device's dense FLOP/s that large matmuls sustain: 600 to 700 of 989 TFLOP/s in bfloat16 on an
#: H100 at its power limit.
MATMUL = 0.65
#: (empirical) share of the memory's bandwidth that pointwise kernels sustain: 2.7 of 3.35 TB/s on an H100.
MEMORY = 0.8
#: (empirical) share of a link's bandwidth that NCCL's large collectives reach: 360 of 450 GB/s of NVLink one way.
NETWORK = 0.8
#: (empirical) seconds to launch a kernel from eager PyTorch.
LAUNCH = 5e-6
#: share of a device's memory that a plan may fill: the rest is for the allocator's slack, the runtime, NCCL's buffers.
MARGIN = 0.9
#: bytes per element of logits at the worst moment of a float32 cross-entropy.
LOSS_BYTES = 12
#: the same, under ``loss_parallel``, on a rank's part of the logits (torch/distributed/tensor/parallel/loss.py, 2.13).
CUT_LOSS_BYTES = 16
_IN = "in backward of {}"


@dataclass(frozen=True)
class Unit:
    """The sizes of one FSDP unit on one rank, as numbers or expressions; letters as above.

    Attributes:
        name: its module.
        block: whether checkpointing may run it again.
        root: whether it is the root.
        parameters: p; ``gradients``: g; ``optimizer``: o; all before dp_shard divides them.
        gathered: q, 0 where nothing is gathered.
        reduced: w, 0 where nothing is reduced.
        kept: k; ``dear``: d; ``entered``: x; ``beyond``: y; ``early``: z, 0 but for the root.
        flops: f; ``dear_flops``: of those, what selective checkpointing does not run again.
        moved: m; ``launches``: l.
    """

    name: str
    block: bool
    root: bool
    parameters: Any = 0
    gradients: Any = 0
    optimizer: Any = 0
    gathered: Any = 0
    reduced: Any = 0
    kept: Any = 0
    dear: Any = 0
    entered: Any = 0
    beyond: Any = 0
    early: Any = 0
    flops: Any = 0
    moved: Any = 0
    launches: int = 0


def state_bytes(units: Sequence[Unit], s: Any) -> Any:
    """Equation 1: bytes of parameters and optimizer state."""
    return sum(u.parameters + u.optimizer for u in units) / s


def gradient_bytes(units: Sequence[Unit], s: Any) -> Any:
    """Equation 2: bytes of gradients once all are reduced."""
    return sum(u.gradients for u in units) / s


def gathered_bytes(unit: Unit) -> Any:
    """Equation 3: bytes of a unit's parameters while it computes."""
    return unit.gathered


def kept_bytes(unit: Unit, checkpointing: str) -> Any:
    """Equation 4: bytes of activations that stay from forward to backward."""
    if not unit.block or checkpointing == "none":
        return unit.kept
    return unit.entered + unit.dear if checkpointing == "selective" else unit.entered


def loss_bytes(logits: Any, cut: bool) -> Any:
    """Return the bytes that the loss holds at its worst moment: c v of equation 5, on cut or on whole logits."""
    return (CUT_LOSS_BYTES if cut else LOSS_BYTES) * logits


def at_the_loss(units: Sequence[Unit], loss: Any, checkpointing: str, reshard: bool) -> Any:
    """Equation 5: bytes beside the state when backward of the loss starts."""
    held = sum(gathered_bytes(u) for u in units if u.root or not reshard)
    return sum(kept_bytes(u, checkpointing) for u in units) + held + loss


def in_backward(unit: Unit, before: Unit | None, after: Unit | None, kept: Any, held: Any, done: Any) -> Any:
    """Equation 6: bytes beside the state at the worst moment of one unit's backward.

    Args:
        unit: the unit.
        before: the one before it in forward, which is gathered next.
        after: the one after it, whose gradients are being reduced.
        kept: bytes of activations of all units before it.
        held: bytes of parameters that are gathered all the time, and of gradients that are not reduced yet.
        done: bytes of gradients that are reduced already.
    """
    ahead = (gathered_bytes(unit) if not unit.root else 0) + (0 if before is None else gathered_bytes(before))
    reducing = 0 if after is None else after.reduced
    return kept + unit.kept + unit.beyond + held + ahead + reducing + done


def at_the_step(units: Sequence[Unit], s: Any) -> Any:
    """Equation 7: bytes beside the state in the optimizer's step."""
    return 2 * gradient_bytes(units, s)


def moments(
    units: Sequence[Unit], loss: Any, checkpointing: str, s: Any, reshard: bool = True
) -> list[tuple[str, Any]]:
    """Return every moment that may be the peak, by name, with its bytes beside the state.

    Args:
        units: in the order of forward, the root last: its own ops lie before and after all others, so that what it
            keeps may stay to the end.
        loss: bytes that the loss holds: ``loss_bytes``.
        checkpointing: ``none``, ``selective`` or ``full``.
        s: degree of dp_shard.
        reshard: whether FSDP frees a unit's parameters after its forward.
    """
    inner = [u for u in units if not u.root]
    roots = [u for u in units if u.root]
    held = sum(gathered_bytes(u) for u in (roots if reshard else units))
    early = sum(u.early for u in roots)
    kept = sum(kept_bytes(u, checkpointing) for u in units)
    done: Any = 0
    found = [("at the loss", at_the_loss(units, loss, checkpointing, reshard))]
    after: Unit | None = None
    for unit in roots:
        last = inner[-1] if inner and reshard else None
        kept_now = kept - kept_bytes(unit, checkpointing)
        found.append((_IN.format("the model's own code"), in_backward(unit, last, None, kept_now, held, 0)))
    for index in range(len(inner) - 1, -1, -1):
        unit, before = inner[index], inner[index - 1] if index and reshard else None
        kept = kept - kept_bytes(unit, checkpointing)
        one = unit if reshard else replace(unit, gathered=0)
        found.append((_IN.format(unit.name), in_backward(one, before, after, kept, held + early, done)))
        done = done + unit.gradients / s
        after = unit
    return [*found, ("in the optimizer's step", at_the_step(units, s))]


def peak_bytes(units: Sequence[Unit], loss: Any, checkpointing: str, s: Any, reshard: bool = True) -> Any:
    """Equation 8."""
    return state_bytes(units, s) + largest([size for _, size in moments(units, loss, checkpointing, s, reshard)])


def ring_seconds(op: str, payload: Any, count: Any, n: Any, speed: Any, latency: Any) -> Any:
    """Equations 9 and 10: seconds of ``count`` collectives of ``payload`` bytes together, over n ranks."""
    once = (n - 1) / n * payload / speed + count * (n - 1) * latency
    return 2 * once if op == "all_reduce" else once


def bandwidth(n: int, apart: int, node: int, link: float, network: float) -> tuple[float, bool]:
    """Equation 11: bytes/s of an axis of n ranks that lie ``apart`` ranks apart, and whether it stays in a node."""
    if n * apart <= node:
        return link, True
    return min(link, max(1.0, node / apart) * network), False


def forward_seconds(flops: Any, moved: Any, launches: Any, rate: Any, memory: Any) -> Any:
    """Equation 12: seconds of one forward. ``rate`` is F in FLOP/s, ``memory`` is M in bytes/s."""
    return largest([flops / rate + moved / memory, launches * LAUNCH])


def compute_seconds(units: Sequence[Unit], checkpointing: str, rate: Any, memory: Any) -> Any:
    """Equation 13: seconds of forward, backward and what is run again."""
    total: Any = 0
    for unit in units:
        total += 3 * forward_seconds(unit.flops, unit.moved, unit.launches, rate, memory)
        if unit.block and checkpointing != "none":
            again = unit.flops if checkpointing == "full" else 0
            total += forward_seconds(again, unit.moved, unit.launches, rate, memory)
    return total


def optimizer_seconds(units: Sequence[Unit], s: Any, memory: Any) -> Any:
    """Equation 14: seconds of the optimizer's step, which reads and writes the state once."""
    return (2 * state_bytes(units, s) + gradient_bytes(units, s)) / memory


def step_seconds(compute: Any, tp: Any, data: Any, ends: Any, optimizer: Any, overlaps: bool) -> Any:
    """Equation 15: seconds of a step.

    Args:
        compute: equation 13.
        tp: seconds of tp's collectives.
        data: seconds of the collectives of data parallelism.
        ends: of those, the first gather and the last reduction.
        optimizer: equation 14.
        overlaps: whether collectives run beside compute.
    """
    exposed = largest([ends, data - compute]) if overlaps else data
    return compute + tp + exposed + optimizer


def largest(values: Sequence[Any]) -> Any:
    """Return the largest of numbers, or sympy's ``Max`` of expressions."""
    return (
        sympy.Max(*values, evaluate=False) if any(isinstance(value, sympy.Basic) for value in values) else max(values)
    )
