"""Random numbers over tp: one stream on all ranks of a tp group, and one of its own where a rank draws for its share.

When a plan is applied, ``one_stream`` gives the ranks of a tp group equal generators and data ranks different ones. A
module that draws for its rank's share (``ModulePlan.draws``) draws one number from the common stream, runs on
generators seeded with that number and its rank, and leaves the common stream where that number left it. So what
is drawn depends on the generators' state at entry alone: activation recomputation, which sets that back, sees the
same numbers again. Run on CPU generators; those of the CUDA device are treated alike, and have not been run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard._torch import in_backward, is_simulated
from autoshard.errors import InvalidArgument
from autoshard.executor.agree import has_peers
from autoshard.executor.collectives import Axis
from autoshard.executor.forward import Forward
from autoshard.executor.sequence import CutSequence
from autoshard.plans import AXES, SEQUENCE

KINDS = ("per_rank", "shared", SEQUENCE)
_WORD = (1 << 64) - 1


def mixed(number: int, index: int) -> int:
    """Return 64 bits that differ between any two indices: the splitmix64 step."""
    bits = (number + (index + 1) * 0x9E3779B97F4A7C15) & _WORD
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _WORD
    return bits ^ (bits >> 31)


def generators(device_type: str) -> list[torch.Generator]:
    """Return the generators that code draws from: the CPU's first, then that of the current device."""
    found = [torch.default_generator]
    if device_type != "cpu":
        device: Any = torch.get_device_module(device_type)
        found.append(device.default_generators[device.current_device()])
    return found


def one_stream(mesh: DeviceMesh) -> None:
    """Let every rank go on with rank 0's generators; data ranks after the first with streams of their own.

    A collective over all ranks. Alone, or where one process stands for many ranks, nothing happens.

    Args:
        mesh: the whole mesh.
    """
    if not has_peers():
        return
    data = mesh.get_local_rank(AXES[0]) * mesh[AXES[1]].size() + mesh.get_local_rank(AXES[1])
    for generator in generators(mesh.device_type):
        state = generator.get_state().to(mesh.device_type)
        dist.broadcast(state, src=0)
        generator.set_state(state.cpu())
        if data:
            generator.manual_seed(mixed(_number(generator), data))


def draw(module: nn.Module, kind: str, axis: Axis, sequence: CutSequence | None = None) -> None:
    """Let ``module`` draw on a rank's own stream (``per_rank``; ``sequence``: while that is cut) or the common one."""
    Drawing(module, kind, axis, sequence).install()


class Drawing(Forward):
    """Runs the forward on other states of the generators; where one process simulates all ranks, on those there are.

    Attributes:
        kind: ``per_rank``, ``sequence`` or ``shared``.
        axis: the tp axis.
        sequence: whether the sequence is cut; None where the plan never cuts it.
    """

    def __init__(self, module: nn.Module, kind: str, axis: Axis, sequence: CutSequence | None = None) -> None:
        super().__init__(module)
        self.kind = kind
        self.axis = axis
        self.sequence = sequence

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; arguments and answer are the module's own."""
        kind = self.kind
        if kind == SEQUENCE and self.sequence is not None:
            kind = "per_rank" if self.sequence.is_cut("what draws random numbers") else ""
        if is_simulated() or not kind:
            return self.inner(*args, **kwargs)
        used = generators(self.axis.mesh.device_type)
        with _per_rank(used, self.axis.mesh.get_local_rank()) if kind == "per_rank" else _shared(used):
            return self.inner(*args, **kwargs)


# the states of the common stream, while a rank's own one runs
_common: ContextVar[list[Tensor] | None] = ContextVar("common", default=None)


@contextmanager
def _per_rank(used: Sequence[torch.Generator], rank: int) -> Iterator[None]:
    """Draw for a rank's share. A block that draws nothing, in eval mode for example, leaves all as it was."""
    before = _states(used)
    seed = mixed(_number(used[0]), rank)
    after = _states(used)
    outer = _common.get()
    common = list(after) if outer is None else outer
    token = _common.set(common)
    for generator in used:
        generator.manual_seed(seed)
    started = _states(used)
    try:
        yield
    finally:
        _common.reset(token)
        if outer is None and not _equal(common, after):
            _restore(used, common)
        else:
            _restore(used, before if _equal(started, _states(used)) else after)


@contextmanager
def _shared(used: Sequence[torch.Generator]) -> Iterator[None]:
    """Draw for whole values inside of a block that draws for a rank's share.

    Raises:
        InvalidArgument: there is no such block because only a part of it is recomputed.
    """
    common = _common.get()
    if common is None:
        if in_backward():
            raise InvalidArgument(
                "random numbers cannot be drawn again as they were: activations are recomputed from inside a module "
                "that draws on a rank's own stream",
                help="recompute that whole module, or the block around it",
            )
        yield
        return
    mine = _states(used)
    _restore(used, common)
    token = _common.set(None)
    try:
        yield
    finally:
        _common.reset(token)
        common[:] = _states(used)
        _restore(used, mine)


def _number(generator: torch.Generator) -> int:
    return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))


def _states(used: Sequence[torch.Generator]) -> list[Tensor]:
    return [generator.get_state() for generator in used]


def _restore(used: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    for generator, state in zip(used, states, strict=True):
        generator.set_state(state)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(map(torch.equal, some, others))
