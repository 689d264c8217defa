"""Build the facts of a plan from a hand plan's style names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from autoshard.executor.match import join
from autoshard.executor.share import has_forward
from autoshard.hand.rules import Rules
from autoshard.hand.styles import STYLES, Meaning
from autoshard.plans import Coverage, GradSum, Mesh, ModulePlan, Parts, Plan, TensorPlan, Unit
from autoshard.proving.proof import Culprit

_WHOLE = Meaning()


class PlanBuilder:
    """Reads the rules for one model.

    Attributes:
        faults: rules that cannot be followed, filled by ``build``.
    """

    def __init__(self, model: nn.Module, rules: Rules[str], tp: int) -> None:
        self.model = model
        self.rules = rules
        self.tp = tp
        self.faults: list[Culprit] = []
        self._names: dict[int, list[str]] = {}
        for name, module in model.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), []).append(name)

    def build(self) -> Plan:
        """Return the tensor-parallel plan; what no rule names stays whole."""
        tensors: dict[str, TensorPlan] = {}
        modules: dict[str, ModulePlan] = {}
        for fqn, module in self.model.named_modules():
            pattern = self.rules.of(self._names[id(module)])
            own = dict(self._own(fqn, module, pattern))
            tensors.update(own)
            if pattern is not None:
                boundary = self._boundary(fqn, module, pattern, STYLES[self.rules[pattern]])
                if boundary is not None:
                    modules[fqn] = boundary
        self._check_ties(tensors)
        size = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return Plan(
            mesh=Mesh(1, 1, self.tp),
            parameters=tensors,
            buffers={},
            modules=modules,
            units=(Unit("", len(tensors), size),),
            memory_bytes={},
            collectives=(),
            coverage=Coverage(0.0, 0.0),
            model=type(self.model).__name__,
        )

    def _own(self, fqn: str, module: nn.Module, pattern: str | None) -> Iterator[tuple[str, TensorPlan]]:
        """Yield the plan of each of the module's own parameters; a rule for the parameter beats the module's."""
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            own = self.rules.of(join(each, name) for each in self._names[id(module)])
            chosen = own or pattern
            meaning = _WHOLE if chosen is None else STYLES[self.rules[chosen]]
            why = "no rule names it" if chosen is None else f"{chosen!r}: {self.rules[chosen]}"
            yield join(fqn, name), self._tensor(join(fqn, name), parameter, meaning, own is None, why)

    def _tensor(self, fqn: str, parameter: nn.Parameter, meaning: Meaning, by_module: bool, why: str) -> TensorPlan:
        shape = tuple(parameter.shape)
        dim = self._dim(fqn, shape, meaning, by_module)
        once = dim is None and by_module and meaning.bias_once and len(shape) == 1
        local = list(shape)
        if dim is not None:
            local[dim] //= self.tp
        parts: Parts | None = None
        if dim is not None and meaning.halves and len(shape) > 1:
            parts = ((0, shape[dim] // 2), (shape[dim] // 2, shape[dim] // 2))
        return TensorPlan(
            shape=shape,
            dtype=str(parameter.dtype).removeprefix("torch."),
            tp_dim=dim,
            tp_parts=parts,
            tp_copies=self.tp if dim is None else 1,
            grad_sum=GradSum(self.tp) if meaning.summed and by_module else None,
            fsdp_dim=None,
            local_shape=tuple(local),
            why=why,
            read="first_rank" if once else "local",
            trainable=parameter.requires_grad,
        )

    def _dim(self, fqn: str, shape: tuple[int, ...], meaning: Meaning, by_module: bool) -> int | None:
        vector = meaning.vector if by_module or meaning.matrix is None else -1
        chosen = meaning.matrix if len(shape) > 1 else vector
        if chosen is None or not shape:
            return None
        dim = chosen % len(shape)
        pieces = self.tp * (2 if meaning.halves and len(shape) > 1 else 1)
        if shape[dim] % pieces:
            self.faults.append(
                Culprit(
                    "size", fqn, f"dim {dim} of {shape} cannot be cut evenly in {pieces} pieces over {self.tp} ranks"
                )
            )
            return None
        return dim

    def _boundary(self, fqn: str, module: nn.Module, pattern: str, meaning: Meaning) -> ModulePlan | None:
        style = self.rules[pattern]
        if meaning.cuts and not any(p is not None for p in module._parameters.values()):
            why = f"{style} names a module that has no parameter of its own: it cuts nothing"
            self.faults.append(Culprit("rule", fqn, why))
            return None
        output = meaning.output
        if meaning.tail:
            output = self._tail(fqn, module)
        inputs = {
            argument: text for position, text in meaning.inputs if (argument := _argument(module, position)) is not None
        }
        if not inputs and not output:
            return None
        if not has_forward(module):
            self.faults.append(Culprit("rule", fqn, f"{style} names a module that is never called"))
            return None
        lookup = _argument(module, 0) if meaning.lookup else None
        return ModulePlan(style, inputs, {"": output} if output else {}, f"{pattern!r}: {style}", lookup=lookup)

    def _tail(self, fqn: str, module: nn.Module) -> str | None:
        """Return the conversion of the answer's last elements, as many as the config's ``qk_rope_head_dim``."""
        config: Any = getattr(self.model, "config", None)
        width = max((p.shape[0] for p in module._parameters.values() if p is not None and p.dim() > 1), default=0)
        try:
            tail = int(config.get_text_config().qk_rope_head_dim)
        except (AttributeError, RuntimeError, TypeError) as error:
            first = str(error).partition(". ")[0]
            why = f"the style takes a size from config.qk_rope_head_dim, which there is not: {first}"
            self.faults.append(Culprit("rule", fqn, why[:300]))
            return None
        return f"R->V[{width - tail}:{width}]" if tail else None

    def _check_ties(self, tensors: dict[str, TensorPlan]) -> None:
        """One parameter that the rules cut in two ways is a fault."""
        groups: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            if name in tensors:
                groups.setdefault(id(parameter), []).append(name)
        for names in groups.values():
            first = tensors[names[0]]
            for name in names[1:]:
                other = tensors[name]
                if (other.tp_dim, other.tp_parts) != (first.tp_dim, first.tp_parts):
                    why = f"it is tied to {name}: the rules cut one on dim {first.tp_dim}, the other on {other.tp_dim}"
                    self.faults.append(Culprit("tie", names[0], why))


def _argument(module: nn.Module, position: int) -> str | None:
    """Return the path of the forward's argument at a position, None where it takes fewer."""
    parameters = list(inspect.signature(module.forward).parameters.values())
    for index, parameter in enumerate(parameters):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return f"{parameter.name}.{position - index}"
        if parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
            return None
        if index == position:
            return parameter.name
    return None
