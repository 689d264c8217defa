"""The plan: frozen, torch-free data that a person can read, edit, store and apply.

A plan holds facts, each with its reason. Conversions between the states of a value on the tp axis are written
``"R->V"``: **R** the same on every rank, **V** the same with a partial gradient, **S(d)** cut along dim ``d``,
**P** a partial sum, **D** cut along dim ``d`` and a DTensor that says so, where gradients are recorded. The executor
reads nothing but this file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoshard.errors import InvalidArgument
from autoshard.patterns import unfold
from autoshard.rewrite.record import CallRewrite

SCHEMA_VERSION = 1
AXES = ("dp_replicate", "dp_shard", "tp")
#: The style of a module that works on a rank's part of the sequence, and how a module draws that does.
SEQUENCE = "sequence"

Parts = tuple[tuple[int, int], ...]
Slices = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Mesh:
    """Degrees of the three mesh axes, outermost first."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def data(self) -> int:
        """Number of data-parallel ranks: how many different batches a step consumes."""
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        return f"dp_replicate={self.dp_replicate} dp_shard={self.dp_shard} tp={self.tp}"


@dataclass(frozen=True)
class GradSum:
    """A gradient that each tp rank has only in part.

    Attributes:
        ranks: over how many tp ranks it is summed.
        parts: ``(offset, length)`` along the cut dim of the rows it concerns; None for the whole parameter.
    """

    ranks: int
    parts: Parts | None = None


@dataclass(frozen=True)
class TensorPlan:
    """What becomes of one parameter or buffer.

    Attributes:
        shape: global shape, in elements.
        dtype: such as ``"float32"``.
        tp_dim: the dim cut over tp, or None where every tp rank holds it whole.
        tp_parts: ``(offset, length)`` pieces of ``tp_dim`` that are each cut evenly; None for one even cut.
        tp_copies: how many tp ranks hold each piece: 1 where fully cut, tp where whole.
        grad_sum: set where a whole parameter has a partial gradient.
        fsdp_dim: the dim cut over dp_shard, or None.
        local_shape: shape on rank 0, in elements.
        why: the reason, one sentence.
        read: how forward sees it: ``"local"``; ``"first_rank"`` for a bias that is added to a partial sum (its value
            on tp rank 0, zeros elsewhere); or ``"slice"`` for ``slices`` of one that every tp rank holds whole.
        trainable: whether it takes a gradient.
        tied_to: the first name of a parameter that has several, or None.
        slices: for ``read="slice"``, ``(offset, length, ways)`` pieces that make up ``slice_dim``, seen end to end: of
            ``ways`` equal shares of a piece tp rank r sees share ``r * ways // tp``; with 1 it sees the piece whole.
        slice_dim: the dim of ``slices``, or None.
    """

    shape: tuple[int, ...]
    dtype: str
    tp_dim: int | None
    tp_parts: Parts | None
    tp_copies: int
    grad_sum: GradSum | None
    fsdp_dim: int | None
    local_shape: tuple[int, ...]
    why: str
    read: str = "local"
    trainable: bool = True
    tied_to: str | None = None
    slices: Slices | None = None
    slice_dim: int | None = None


@dataclass(frozen=True)
class ModulePlan:
    """What happens at the boundary of one module (or of each module a pattern such as ``layers.{0-3}.up`` names).

    Attributes:
        style: ``colwise``, ``rowwise``, ``colwise_gather_output``, ``embedding_rowwise``, ``region``, ``replicate``,
            ``resize``, ``sequence`` (it works on the rank's part of the sequence while that is cut).
        inputs: argument name (``"hidden_states"``, or ``"hidden_states.0"`` inside a container) to conversion.
        outputs: output path (``""`` for a single tensor, ``"0"``, ``"logits"``) to conversion.
        why: the reason, one sentence.
        share: argument name to the name of an entry that several modules share: one value, one all-reduce.
        lookup: for a row-cut table, the argument that holds the global row numbers.
        attributes: integer attributes that are set on the module, so that sizes in its code become local; dotted names
            lead into objects that it holds, of which it gets its own copies.
        rewrites: arguments in its code that are written otherwise for this module, for the same.
        draws: ``per_rank`` where its forward draws random numbers for a rank's share, which must differ over tp;
            ``sequence`` where it does so only while the sequence is cut; ``shared`` where it runs inside such a module
            and draws for whole values; None where nothing is to be done.
        returns: output path to conversion, or ``refuse``, of what it returns while it is not whole and nobody in the
            trace takes: done where the model itself returns it, and only then.
        sequence: what takes the place of these conversions while the sequence is cut: ``"inputs:"``, ``"outputs:"`` or
            ``"returns:"`` and a path, to conversion; ``""`` for none; ``"takes:"`` is ``"returns:"`` for an argument.
            See ``Plan.sequence``.
    """

    style: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    share: Mapping[str, str] = field(default_factory=dict)
    lookup: str | None = None
    attributes: Mapping[str, int] = field(default_factory=dict)
    rewrites: tuple[CallRewrite, ...] = ()
    draws: str | None = None
    returns: Mapping[str, str] = field(default_factory=dict)
    sequence: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Unit:
    """One FSDP unit: parameters that are gathered and freed together.

    Attributes:
        module: the module's name or a folded pattern; ``""`` is the root.
        num_parameters: how many parameters one such unit holds.
        parameter_bytes: bytes of them on one tp rank, gathered over dp_shard.
    """

    module: str
    num_parameters: int
    parameter_bytes: int


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind in one step (forward and backward).

    Attributes:
        axis: the mesh axis it runs over.
        op: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
        count: how many a step.
        bytes: payload of all of them on one rank: the input of an all-reduce or reduce-scatter, the output of an
            all-gather.
        what: ``activation``, ``parameter``, ``gradient`` or ``gradient sum``.
    """

    axis: str
    op: str
    count: int
    bytes: int
    what: str


@dataclass(frozen=True)
class Coverage:
    """Shares in [0, 1] that are cut over tp; ``left`` says what is not and why, largest first."""

    parameter_bytes: float
    matmul_flops: float
    left: tuple[tuple[str, float, str], ...] = ()


@dataclass(frozen=True)
class Refusal:
    """Something that was not cut, with the place that forbids it."""

    fqn: str
    where: str
    why: str


@dataclass(frozen=True)
class Replacement:
    """A module of torch that is replaced in place by an equivalent in which cuts can run.

    Attributes:
        fqn: the module's name or a folded pattern.
        kind: ``attention``, ``layer``, ``encoder`` or ``decoder``: which of torch's own modules it is.
        why: the reason, one sentence.
    """

    fqn: str
    kind: str
    why: str


@dataclass(frozen=True)
class MeshChoice:
    """One mesh that was considered, with the fastest way to train on it that fits.

    Attributes:
        mesh: its degrees.
        total_bytes: bytes per rank at the worst moment of a step; 0 where it was not priced.
        verdict: one line: where its time goes, what it lacks, or why it was not priced.
        fits: whether the bytes fit.
        checkpointing: ``none``, ``selective`` or ``full``.
        reshard: whether FSDP frees a unit's parameters after its forward.
        sequence_parallel: whether the sequence is cut over tp between regions.
        batch: sequences per data rank.
        step_seconds: of one forward, backward and optimizer step.
        tokens_per_second: of each device.
        max_batch: the most sequences of a data rank that would fit; None where that was not worked out.
    """

    mesh: Mesh
    total_bytes: int
    verdict: str
    fits: bool = False
    checkpointing: str = "none"
    reshard: bool = True
    sequence_parallel: bool = False
    batch: int = 1
    step_seconds: float = 0.0
    tokens_per_second: float = 0.0
    max_batch: int | None = None


@dataclass(frozen=True)
class Workload:
    """What one step computes, and in what.

    Attributes:
        batch: sequences per data-parallel rank.
        sequence: tokens per sequence.
        dtype: dtype of activations.
        optimizer: ``adamw``, ``sgd`` or ``sgd-momentum``: what it keeps of each parameter.
        stored: dtype that trained parameters and their gradients are held in where it is not their own, or None.
        reduced: dtype that gradients are reduced in under mixed precision, or None.
        tp_reduced: dtype that sums over tp run in, where it is not that of each value, or None.
    """

    batch: int = 1
    sequence: int = 2048
    dtype: str = "bfloat16"
    optimizer: str = "adamw"
    stored: str | None = None
    reduced: str | None = None
    tp_reduced: str | None = None


@dataclass(frozen=True)
class PassTime:
    """How long a pass took and what it found, one line."""

    name: str
    seconds: float
    summary: str


@dataclass(frozen=True)
class Plan:
    """A plan for one model on one mesh. ``print(plan)`` shows it; ``save`` and ``load`` go through JSON.

    ``sequence`` holds the arguments of the model, with their dim, whose length tp must divide in training: between
    regions each rank works on its part of the sequence. It is empty where the sequence stays whole, as it does
    under ``torch.no_grad()`` in any case.
    """

    mesh: Mesh
    parameters: Mapping[str, TensorPlan]
    buffers: Mapping[str, TensorPlan]
    modules: Mapping[str, ModulePlan]
    units: tuple[Unit, ...]
    memory_bytes: Mapping[str, int]
    collectives: tuple[Collective, ...]
    coverage: Coverage
    workload: Workload = Workload()
    peak_bytes: int = 0
    peak_when: str = ""
    step_seconds: Mapping[str, float] = field(default_factory=dict)
    checkpointing: str = "none"
    reshard: bool = True
    device: str = ""
    why_mesh: str = ""
    meshes: tuple[MeshChoice, ...] = ()
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    replacements: tuple[Replacement, ...] = ()
    sequence: Mapping[str, int] = field(default_factory=dict)
    model: str = ""
    schema_version: int = SCHEMA_VERSION
    times: tuple[PassTime, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        from autoshard.report import render_text

        return render_text(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data. Times are left out: a plan is the same on every machine."""
        data = dataclasses.asdict(self)
        del data["times"]
        return data

    def to_json(self) -> str:
        """Return the plan as JSON text, keys in a fixed order."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the plan to ``path`` as JSON."""
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan that ``save`` wrote.

        Raises:
            InvalidArgument: the file is not a plan of a schema this version knows.
        """
        try:
            data = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"cannot read the plan {path}", got=str(error), help="give a file that `autoshard explain --json` wrote"
            ) from error
        return Plan.from_dict(data)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Plan:
        """Build a plan from what ``to_dict`` gave, or from a hand-written equivalent.

        Raises:
            InvalidArgument: a key is missing, unknown or of another schema version.
        """
        from autoshard.plan_data import plan_of

        version = data.get("schema_version") if isinstance(data, Mapping) else None
        if version != SCHEMA_VERSION:
            raise InvalidArgument(
                f"this plan has schema_version {version!r}",
                got=f"{version!r}; allowed: {SCHEMA_VERSION}",
                help="make the plan again with this version of autoshard",
            )
        try:
            return plan_of(dict(data))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise InvalidArgument(
                "the plan is not well formed",
                got=str(error),
                help="compare it with a file that `autoshard explain --json` writes",
            ) from error

    def module_plans(self) -> Iterator[tuple[str, ModulePlan]]:
        """Yield ``(fqn, plan)`` for every module, patterns unfolded."""
        for pattern, module in self.modules.items():
            for index, fqn in enumerate(unfold(pattern)):
                yield (
                    fqn,
                    dataclasses.replace(
                        module, share={k: unfold(v)[index if "{" in v else 0] for k, v in module.share.items()}
                    ),
                )

    def unit_modules(self) -> list[str]:
        """Return the module name of every FSDP unit, in order, patterns unfolded."""
        return [fqn for unit in self.units for fqn in unfold(unit.module)]

    @property
    def cuts_logits(self) -> bool:
        """Whether the model returns something as it is cut, where gradients are recorded."""
        return any(text.endswith(("->D", "->LD")) for text in self._conversions())

    @property
    def cuts_losses(self) -> bool:
        """Whether the model computes a loss of logits that are cut, where gradients are recorded."""
        return any(text.endswith(("->L", "->LD")) for text in self._conversions())

    def _conversions(self) -> Iterator[str]:
        """Yield what is converted where modules return, and in their code."""
        for module in self.modules.values():
            yield from module.outputs.values()
            yield from (one.after.partition(",")[0].rstrip("'") for one in module.rewrites if one.converts)

    @property
    def total_bytes(self) -> int:
        """Bytes per rank at the worst moment of a step."""
        return self.peak_bytes or sum(self.memory_bytes.values())
