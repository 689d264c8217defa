"""What `make demo` runs: the plan of a published 8B Llama, then a small one trained on 4 local processes (FSDP x TP).

The same training runs in one process beside it, on the same batches, and every loss is compared.
"""

from __future__ import annotations

import argparse
import logging
import queue
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessContext, spawn
from train import make_model, train

import autoshard

DP_SHARD, TP = 2, 2
WORLD = DP_SHARD * TP
TOLERANCE = 1e-3  # float32, and Adam divides by small numbers
HERE = Path(__file__).parent
T = TypeVar("T")


def held_bytes(tensors: Iterable[Any]) -> int:
    """Bytes that this process holds of the tensors."""
    local = [one.to_local() if isinstance(one, DTensor) else one for one in tensors if isinstance(one, Tensor)]
    return sum(one.nbytes for one in local)


def sizes(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Bytes of parameters and of optimizer state in this process."""
    state = (value for values in optimizer.state.values() for value in values.values())
    return held_bytes(model.parameters()), held_bytes(state)


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model(hf=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def work(rank: int, folder: str, steps: int, losses: Queue[tuple[int, float]], held: Queue[tuple[int, int]]) -> None:
    """One of the sharded processes."""
    torch.set_num_threads(1)
    # torch warns on every rank that the norm of all gradients takes two all-reduces, one for each axis
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    model, optimizer = make()
    autoshard.auto_parallelize(model, tp=TP, dp_shard=DP_SHARD, optimizer=optimizer)
    # tp is the innermost axis of the mesh: ranks that differ in tp only see the same data
    for step, loss in enumerate(train(model, optimizer, steps, data_rank=rank // TP, num_data=DP_SHARD)):
        losses.put((step, loss))
    held.put(sizes(model, optimizer))
    dist.destroy_process_group()


def receive(results: Queue[T], workers: ProcessContext) -> T:
    """The next result; what a worker raised is raised here."""
    while True:
        try:
            return results.get(timeout=1)
        except queue.Empty:
            if workers.join(timeout=0):
                raise RuntimeError("the workers ended early") from None


def whole_losses(losses: Queue[tuple[int, float]], workers: ProcessContext, steps: int) -> Iterator[float]:
    """Yield the loss of each whole batch: the mean over ranks, as each sees an equal share of it."""
    early: dict[int, list[float]] = defaultdict(list)
    for step in range(steps):
        while len(early[step]) < WORLD:
            at, loss = receive(losses, workers)
            early[at].append(loss)
        yield sum(early.pop(step)) / WORLD


def compare(
    sharded: Iterator[float], alone: Iterator[float], steps: int, console: Console
) -> list[tuple[float, float]]:
    """Run both side by side under a progress bar, and return the losses of each step."""
    pairs = []
    text = TextColumn("{task.description}")
    with Progress(text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("training", total=steps)
        for ours, reference in zip(sharded, alone, strict=True):
            pairs.append((ours, reference))
            progress.update(task, advance=1, description=f"loss {ours:.4f}, in one process {reference:.4f}")
            if len(pairs) % 10 == 0 or len(pairs) == 1:
                progress.print(f"step {len(pairs):3}   4 processes {ours:.6f}   1 process {reference:.6f}")
    return pairs


def table(before: tuple[int, int], after: list[tuple[int, int]]) -> Table:
    """Bytes of one process before and after sharding."""
    shown = Table("bytes per rank", "one process", f"4 processes (dp_shard={DP_SHARD} tp={TP})", "ratio", box=box.ASCII)
    for name, whole, parts in zip(("parameters", "optimizer state"), before, zip(*after, strict=True), strict=True):
        shown.add_row(name, f"{whole:,}", f"{max(parts):,}", f"{max(parts) / whole:.3f}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    console = Console(highlight=False)
    console.rule("the plan of Llama-3-8B on 8 ranks", characters="-")
    config = str(HERE / "llama3_8b.json")
    subprocess.run([sys.executable, "-m", "autoshard", "explain", config, "--world", "8", "--tp", "2"], check=True)

    model, optimizer = make()
    count = sum(one.numel() for one in model.parameters())
    console.rule(f"training {count / 1e6:.1f} million parameters on {WORLD} processes", characters="-")
    torch.set_num_threads(1)
    context = get_context("spawn")
    losses, held = context.Queue(), context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = spawn(work, (folder, steps, losses, held), nprocs=WORLD, join=False)
        pairs = compare(whole_losses(losses, workers, steps), train(model, optimizer, steps), steps, console)
        after = [receive(held, workers) for _ in range(WORLD)]
        while not workers.join():
            pass
    worst = max(abs(ours - reference) for ours, reference in pairs)
    console.print(table(sizes(model, optimizer), after))
    console.print(f"largest difference of the loss over {steps} steps: {worst:.2e}")
    if worst > TOLERANCE:
        sys.exit(f"the sharded run differs from the run in one process by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
