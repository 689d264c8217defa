"""Parameters cut in parts or read in slices, on gloo ranks: trained, gathered, saved and loaded as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import parts_workers
import pytest
import torch
from parts_models import Model
from rows import few
from spawn import Pool
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from autoshard.executor.training import Training
from autoshard.plans import Mesh

TOLERANCE = 1e-9
TENSOR_PARALLEL, WIDE, WITH_FSDP, HYBRID = Mesh(1, 1, 2), Mesh(1, 1, 4), Mesh(1, 2, 2), Mesh(2, 1, 2)

Gloo = Callable[[int], Pool]


def exact(errors: dict[str, float]) -> bool:
    wrong = {name: error for name, error in errors.items() if not error < TOLERANCE}
    assert not wrong, wrong
    return bool(errors)


@pytest.mark.parametrize("mesh", few([TENSOR_PARALLEL, WIDE, WITH_FSDP, HYBRID], 3), ids=str)
def test_trains_as_the_untouched_model(gloo: Gloo, mesh: Mesh) -> None:
    assert exact(gloo(mesh.world).run(parts_workers.parity, mesh)[0])


@pytest.mark.parametrize("mesh", [TENSOR_PARALLEL, WITH_FSDP], ids=str)
@pytest.mark.parametrize("way", few(["foreach", "fused"], 1))
def test_an_optimizer_with_state_follows(gloo: Gloo, mesh: Mesh, way: str) -> None:
    assert exact(gloo(mesh.world).run(parts_workers.parity, mesh, True, **{way: True})[0])


def test_saved_on_one_mesh_and_loaded_on_others(gloo: Gloo, tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    gloo(4).run(parts_workers.save, WITH_FSDP, folder)
    wanted = torch.load(folder + ".pt", weights_only=False)["model"]
    for suffix in ("", "-async", "-offloaded"):
        state = {"model": Model(1).state_dict()}
        dcp_load(state, checkpoint_id=folder + suffix, no_dist=True)
        assert exact(parts_workers.worst(suffix, state["model"], wanted))
    for mesh in (WIDE, WITH_FSDP, TENSOR_PARALLEL):
        assert exact(gloo(mesh.world).run(parts_workers.load, mesh, folder)[0])


@pytest.mark.parametrize("mesh", [TENSOR_PARALLEL, WITH_FSDP], ids=str)
def test_whole_and_canonical_tensors_are_put_in_order(gloo: Gloo, mesh: Mesh) -> None:
    assert exact(gloo(mesh.world).run(parts_workers.load_whole, mesh)[0])


@pytest.mark.parametrize(
    "training", [Training(checkpointing="full"), Training(compile=True, compile_backend="aot_eager")], ids=str
)
def test_recomputed_and_compiled_blocks(gloo: Gloo, training: Training) -> None:
    assert exact(gloo(2).run(parts_workers.parity, TENSOR_PARALLEL, training=training)[0])


@pytest.mark.parametrize("mesh", [TENSOR_PARALLEL, WITH_FSDP], ids=str)
def test_what_mixes_positions_is_refused(gloo: Gloo, mesh: Mesh) -> None:
    for name, said in gloo(mesh.world).run(parts_workers.refused, mesh)[0].items():
        assert "cut in parts" in said, (name, said)


def test_copies_and_pickles(gloo: Gloo) -> None:
    assert exact(gloo(2).run(parts_workers.copies, TENSOR_PARALLEL)[0])


@pytest.mark.parametrize("how", ["parts", "slices", "order"])
def test_a_spoiled_plan_is_seen(gloo: Gloo, how: str) -> None:
    assert max(gloo(2).run(parts_workers.spoiled, TENSOR_PARALLEL, how)[0].values()) > 1e-2
