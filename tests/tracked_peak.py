"""The peak of a training step that torch's memory trackers see on fake tensors, beside the plan's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from counting import training_of
from simulate import fake_world
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule

from autoshard.executor.execute import apply, make_mesh
from autoshard.pipeline import Options, run
from autoshard.plans import AXES, Plan


@dataclass(frozen=True)
class Point:
    """One step whose peak is tracked.

    Attributes:
        name: of the model, for people.
        build: makes the model; called under the meta device.
        mesh: dp_replicate, dp_shard, tp.
        batch: sequences per data rank; ``length``: tokens of each.
        options: further options of the plan, and with it of training.
        dtype: of the model.
    """

    name: str
    build: Callable[[], nn.Module]
    mesh: tuple[int, int, int]
    batch: int
    length: int
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16

    def model(self) -> nn.Module:
        """Return the model on the meta device."""
        with torch.device("meta"):
            return self.build().to(self.dtype)

    def plan(self) -> Plan:
        """Return the plan of a step with AdamW."""
        ids = torch.zeros(self.batch, self.length, dtype=torch.long, device="meta")
        model = self.model()
        given: Any = {"input_ids": ids} if hasattr(model, "config") else (ids,)
        asked: dict[str, Any] = {"reshard": True, "sequence_parallel": False, "checkpointing": "none"}
        degrees: dict[str, Any] = dict(zip(AXES, self.mesh, strict=True))
        wanted = Options(
            math.prod(self.mesh), batch=self.batch, sequence=self.length, example_inputs=given, **degrees,
            **asked | dict(self.options),
        )  # fmt: skip
        return run(model, wanted)[0]


def tracked(point: Point, plan: Plan) -> int:
    """Return the bytes that are alive at the worst moment of a second step, the optimizer's state among them.

    The optimizer steps parameter by parameter: torch's groups of tensors are not freed in the trackers' count.
    """
    model = point.model()
    with fake_world(plan.mesh.world):
        apply(model, plan, make_mesh(plan, "cpu"), training=training_of(plan, **point.options))
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
            tracker = FSDPMemTracker(model, optimizer) if isinstance(model, FSDPModule) else MemTracker()
            tracker.track_external(model, optimizer)
            # the first step makes the optimizer's state, and DTensors find their rules on whole shapes in it; the
            # peak starts anew with each block
            for _ in range(2):
                tracker.reset_mod_stats()
                with tracker:
                    _step(model, optimizer, point)
            return int(sum(sizes["Total"] for sizes in tracker.get_tracker_snapshot("peak").values()))


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, point: Point) -> None:
    ids = torch.zeros(point.batch, point.length, dtype=torch.long)
    answer = model(input_ids=ids) if hasattr(model, "config") else model(ids)
    logits = answer if isinstance(answer, torch.Tensor) else answer.logits
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())
    del answer, logits
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
