"""The same comparison on two real processes: what the simulation says of a hand plan, gloo must say too."""

from __future__ import annotations

import copy
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from autoshard.hand.reader import from_hand
from autoshard.hand.subject import HandSubject
from autoshard.proving.analysis import Analysis
from autoshard.proving.cases import make_cases
from autoshard.proving.observe import Observed
from autoshard.proving.runs import Run, Weights, reference, run
from autoshard.proving.simulate import on_each_rank
from autoshard.proving.specimen import make_specimen
from autoshard.proving.trial import compare

WORLD = 2


def on_processes(types: list[str]) -> Iterator[dict[str, Any]]:
    """Apply each type's hand plan with the executor on two gloo processes; yield type, verdict and seconds."""
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder, "answers")
        answers.touch()
        mp.spawn(_rank, (types, _free_port(), str(answers)), nprocs=WORLD)  # type: ignore[attr-defined,no-untyped-call]
        yield from (json.loads(line) for line in answers.read_text().splitlines())


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
    return port


def _rank(rank: int, types: list[str], port: int, answers: str) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=timedelta(seconds=300))
    try:
        for model_type in types:
            start = time.perf_counter()
            row = {"type": model_type, "verdict": "right" if _compared(model_type) else "wrong"}
            if rank == 0:
                with Path(answers).open("a") as file:
                    file.write(json.dumps({**row, "seconds": round(time.perf_counter() - start, 1)}) + "\n")
    finally:
        dist.destroy_process_group()


def _compared(model_type: str) -> bool:
    """Whether every output and gradient agrees on every rank; a share on which the forward fails does not."""
    from zoo.tiny import tiny

    model, inputs = tiny(model_type)
    specimen = make_specimen(model, WORLD, lambda: Analysis(model, WORLD, inputs).placed, given=inputs)
    hand = from_hand(specimen.model, model.tp_plan, WORLD)
    cases = make_cases(specimen.model, inputs)
    weights: list[Weights] = [{} for _ in cases]
    wants = reference(copy.deepcopy(specimen.model), cases, weights)
    cuts = HandSubject(hand).install(specimen.model)
    try:
        mine = run(specimen.model, cases, weights, lambda tensor: on_each_rank(tensor, 1), [])
    except (RuntimeError, ValueError, TypeError):
        mine = None  # every rank has the same shapes: all fail together
    everyone: list[list[Run] | None] = [None] * WORLD
    dist.all_gather_object(everyone, mine and [Run(each.outputs, each.gradients, Observed()) for each in mine])
    ranks = [each for each in everyone if each is not None]
    return len(ranks) == WORLD and compare(wants, _joined(ranks), cuts).right


def _joined(ranks: list[list[Run]]) -> list[Run]:
    """Put what the ranks have side by side, as the simulation gives it."""
    joined = []
    for runs in zip(*ranks, strict=True):
        outputs = {path: [each.outputs[path][0] for each in runs] for path in runs[0].outputs}
        gradients = {
            fqn: None if first is None else [(each.gradients[fqn] or [])[0] for each in runs]
            for fqn, first in runs[0].gradients.items()
        }
        joined.append(Run(outputs, gradients, Observed()))
    return joined
