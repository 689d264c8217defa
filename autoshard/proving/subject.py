"""What is put to the proof: something that installs itself on a model, and says how each parameter is then cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from autoshard.executor.execute import apply, make_mesh
from autoshard.plans import Parts, Plan


@dataclass(frozen=True)
class Cut:
    """How the ranks hold one parameter.

    Attributes:
        dim: the dim that is cut, None where each rank holds it whole.
        parts: ``(offset, length)`` pieces of the dim that are each cut, laid end to end; None for one cut.
    """

    dim: int | None = None
    parts: Parts | None = None

    def shares(self, whole: Tensor, world: int) -> list[Tensor]:
        """Return what each rank holds of ``whole``: of its size, or with the last ranks holding less or nothing."""
        if self.dim is None:
            return [whole] * world
        pieces = [whole.narrow(self.dim, *part) for part in self.parts or ((0, whole.shape[self.dim]),)]
        cut = [_chunks(piece, world, self.dim) for piece in pieces]
        return [torch.cat(rank, self.dim) for rank in zip(*cut, strict=True)]


def _chunks(piece: Tensor, world: int, dim: int) -> list[Tensor]:
    chunks = list(piece.chunk(world, dim))
    return chunks + [piece.narrow(dim, 0, 0)] * (world - len(chunks))


class Subject(Protocol):
    """A plan of either kind."""

    @property
    def tp(self) -> int:
        """Number of tp ranks."""

    @property
    def two_modes(self) -> bool:
        """Whether the model runs otherwise without gradients."""

    def install(self, model: nn.Module) -> Mapping[str, Cut]:
        """Change ``model``, float64 on CPU, to its share; return how each parameter is cut. Runs on simulated ranks."""


@dataclass(frozen=True)
class PlanSubject:
    """A plan of ours, applied by the executor."""

    plan: Plan

    @property
    def tp(self) -> int:
        """Number of tp ranks."""
        return self.plan.mesh.tp

    @property
    def two_modes(self) -> bool:
        """Whether the sequence, or logits that the model returns or computes a loss of, are cut in training only."""
        return bool(self.plan.sequence) or self.plan.cuts_logits or self.plan.cuts_losses

    def install(self, model: nn.Module) -> Mapping[str, Cut]:
        """Apply the plan."""
        apply(model, self.plan, make_mesh(self.plan, "cpu"))
        return cuts_of(self.plan)


def cuts_of(plan: Plan) -> dict[str, Cut]:
    """Return how a plan cuts each parameter."""
    return {fqn: Cut(tensor.tp_dim, tensor.tp_parts) for fqn, tensor in plan.parameters.items()}
