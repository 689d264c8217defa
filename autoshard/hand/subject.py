"""Install a hand plan on a model: style names through our executor, style objects through torch itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from autoshard._torch import lift, spec_of
from autoshard.executor.execute import apply, make_mesh
from autoshard.hand.reader import HandPlan, fits
from autoshard.plans import AXES
from autoshard.proving.subject import Cut, cuts_of


@dataclass(frozen=True)
class HandSubject:
    """A hand plan that is put to the proof."""

    hand: HandPlan

    @property
    def tp(self) -> int:
        """Number of tp ranks."""
        return self.hand.plan.mesh.tp

    @property
    def two_modes(self) -> bool:
        """A plan written by hand is the same in every mode."""
        return False

    def install(self, model: nn.Module) -> Mapping[str, Cut]:
        """Apply the rules: those with names first, and torch's styles to modules that no name concerns."""
        mesh = make_mesh(self.hand.plan, "cpu")
        if not self.hand.literal:
            apply(model, self.hand.plan, mesh)
            return cuts_of(self.hand.plan)
        leave = _under(model, self.hand.literal)
        if self.hand.plan.modules or any(t.tp_dim is not None for t in self.hand.plan.parameters.values()):
            apply(model, self.hand.plan, mesh, leave=leave)
        literally(model, mesh[AXES[2]], self.hand.literal)
        cuts = cuts_of(self.hand.plan)
        named = model.named_parameters(remove_duplicate=False)
        return {fqn: cuts[fqn] if cuts[fqn].parts else _cut(parameter) for fqn, parameter in named}


def literally(model: nn.Module, mesh: DeviceMesh, styles: Mapping[str, ParallelStyle]) -> None:
    """Hand ``styles`` to torch's ``parallelize_module``; what they leave plain is one copy on each simulated rank."""
    parallelize_module(model, mesh, dict(styles), src_data_rank=None)
    lifted: dict[int, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not isinstance(parameter, DTensor):
                if id(parameter) not in lifted:
                    lifted[id(parameter)] = nn.Parameter(lift(parameter.detach()), parameter.requires_grad)
                module._parameters[name] = lifted[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = lift(buffer)


def _under(model: nn.Module, styles: Mapping[str, ParallelStyle]) -> frozenset[str]:
    """Return the modules that torch's styles name, with everything inside them."""
    hit = [name for name, _ in model.named_modules() if any(fits(pattern, name) for pattern in styles)]
    return frozenset(
        name for name, _ in model.named_modules() if any(name == top or name.startswith(f"{top}.") for top in hit)
    )


def _cut(parameter: Tensor) -> Cut:
    if not isinstance(parameter, DTensor):
        return Cut()
    placement = spec_of(parameter).placements[-1]
    return Cut(getattr(placement, "dim", None))
