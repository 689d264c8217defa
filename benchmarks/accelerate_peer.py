"""accelerate's FSDP2 helpers beside autoshard: ``python benchmarks/accelerate_peer.py --write``.

Needs ``pip install accelerate==1.15.0``. Its ``Accelerator`` wants a GPU for FSDP2; the functions that move an
optimizer do not, so they are called here as its ``_prepare_fsdp2`` calls them, around torch's ``fully_shard``, on 4
gloo ranks.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import torch
import torch.distributed as dist
from page import show, table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import autoshard

CASES = {
    "AdamW, model on CPU": ("AdamW", "cpu", 0),
    "AdamW, model on CPU, two steps taken": ("AdamW", "cpu", 2),
    "Adagrad, model on CPU": ("Adagrad", "cpu", 0),
    "SGD with momentum, model on CPU, two steps taken": ("SGD", "cpu", 2),
    "AdamW, model on meta": ("AdamW", "meta", 0),
}


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer of ``torch.optim`` with settings under which rounding stays rounding."""
    extra: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {"eps": 1e-3}
    made: torch.optim.Optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **extra)
    return made


def by_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Shard over all ranks, and let accelerate move the optimizer."""
    from accelerate.utils.fsdp_utils import fsdp2_canonicalize_names, fsdp2_switch_optimizer_parameters

    old = fsdp2_canonicalize_names({name: p.data_ptr() for name, p in model.named_parameters()})
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            group["params"][index] = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
            group["params"][index].data_ptr = parameter.data_ptr()
    del parameter
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    new = fsdp2_canonicalize_names(dict(model.named_parameters()))
    fsdp2_switch_optimizer_parameters(optimizer, {old[name]: new[name] for name in old})


def measure(who: str, data: dict[str, Any], kind: str, start: str, steps: int) -> dict[str, Any]:
    """Shard with an optimizer made before, train three steps; return what became of it."""
    from memory_workers import build, ids
    from models import token_loss

    from autoshard.optim.state import cut_like
    from autoshard.reading import read_plan

    reference = build()
    with torch.device(start):
        model = build()
    optimizer, twin = make_optimizer(kind, model), make_optimizer(kind, reference)

    def step(one: nn.Module, its: torch.optim.Optimizer, rows: Tensor) -> None:
        its.zero_grad()
        token_loss(one(rows), rows).backward()
        its.step()

    for seed in range(steps):
        step(model, optimizer, ids(seed))
        step(reference, twin, ids(seed))
    optimizer.zero_grad()
    old = [weakref.ref(parameter) for parameter in model.parameters()]
    if who == "accelerate":
        by_accelerate(model, optimizer)
    else:
        autoshard.parallelize(model, read_plan(data), optimizer=optimizer)
    if start == "meta":
        model.to_empty(device="cpu")
        values = dict(reference.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(cut_like(name, values[name].detach(), parameter))
    gc.collect()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    answer: dict[str, Any] = {
        "held": f"{len(held & {id(p) for p in model.parameters()})} of {len(old)}",
        "alive": sum(p.nbytes for ref in old if (p := ref()) is not None and not p.is_meta),
        "error": "",
        "state_dict": "works",
    }
    rank = dist.get_rank()
    try:
        for seed in range(steps, steps + 3):
            step(reference, twin, ids(seed))
            step(model, optimizer, ids(seed)[rank : rank + 1])
    except KeyError as error:
        answer["error"] = f"`step()`: KeyError {error}"
    try:
        copy.copy(optimizer.state_dict())
    except KeyError:
        answer["state_dict"] = "KeyError"
    wants, gots = dict(reference.named_parameters()), autoshard.full_parameters(model)
    difference = max(float((got - wants[name]).detach().abs().max()) for name, got in gots.items())
    answer["difference"] = answer["error"] or f"{difference:.0e}"
    return answer


def main() -> None:
    """Measure and show."""
    import accelerate
    from memory_workers import BATCH, LENGTH, build
    from spawn import close_all, pool

    warnings.simplefilter("ignore")
    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    plan = autoshard.plan(build(), world=4, example_inputs=(ids,), dp_shard=4, tp=1)
    rows = []
    for label, case in CASES.items():
        for who in ("accelerate", "autoshard"):
            got = pool(4).run(measure, who, plan.to_dict(), *case)[0]
            version = accelerate.__version__ if who == "accelerate" else autoshard.__version__
            rows.append(
                (label, f"{who} {version}", got["held"], f"{got['alive']:,}", got["state_dict"], got["difference"])
            )
    close_all()
    header = (
        "situation", "who", "parameters that the optimizer holds", "bytes left of the full model", "`state_dict()`",
        "after 3 more steps, largest difference from one process",
    )  # fmt: skip
    show("memory.md", {"accelerate": table(header, rows)})


if __name__ == "__main__":
    main()
