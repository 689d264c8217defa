"""The report's table of modules: which tensors are cut, on which dim, and what is converted at the boundary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.console import RenderableType
from rich.text import Text

from autoshard.layout import columns, reasoned, section
from autoshard.patterns import unfold
from autoshard.plans import ModulePlan, Plan, TensorPlan

_LEGEND = "R whole, V whole with a partial gradient, S(d) cut on dim d, P a partial sum"
_RETURNED = ", D a DTensor that says how it is cut"
_LOSSES = ", L (LD) logits whose cross-entropy is computed on each rank's part, then returned whole (cut)"
_SEQUENCE = "; (sequence): what takes its place in training, when the sequence is cut between regions"


def modules(plan: Plan) -> Iterator[RenderableType]:
    """Yield the table of modules, or nothing; modules with one decision share a row, layers are folded."""
    cut = {
        name: one for name, one in {**plan.parameters, **plan.buffers}.items() if one.tp_dim is not None or one.slices
    }
    owned: dict[str, list[str]] = {}
    for name in cut:
        owned.setdefault(name.rpartition(".")[0], []).append(name)
    groups: dict[tuple[str, str], list[str]] = {}
    for pattern, module in plan.modules.items():
        names = [name for owner in unfold(pattern) for name in owned.pop(owner, ())]
        decision = ", ".join([module.style, *_distinct(_cut(name, cut[name]) for name in names), *_conversions(module)])
        groups.setdefault((decision, module.why), []).append(pattern)
    # tensors that sit in a module without a boundary of its own, such as a buffer that follows its heads
    for name in (name for names in owned.values() for name in names):
        groups.setdefault((_cut(name, cut[name]), cut[name].why), []).append(name)
    if groups:
        legend = _LEGEND + (_RETURNED if plan.cuts_logits else "") + (_LOSSES if plan.cuts_losses else "")
        legend += _SEQUENCE if plan.sequence else ""
        yield section("Cut over tp", columns(reasoned(groups), "nl"), Text(legend, style="dim"))


def _cut(name: str, tensor: TensorPlan) -> str:
    """Say how one tensor is cut, such as ``weight dim 0``; or what a rank sees of one that is whole."""
    if tensor.slices:
        return f"{name.rpartition('.')[2]} dim {tensor.slice_dim} read in {len(tensor.slices)} slices"
    text = f"{name.rpartition('.')[2]} dim {tensor.tp_dim}"
    if tensor.tp_parts is not None:
        text += f" in {len(tensor.tp_parts)} parts"
    return text if tensor.tp_copies == 1 else f"{text} on {tensor.tp_copies} ranks each"


def _conversions(module: ModulePlan) -> Iterator[str]:
    """Say what is converted at the boundary, such as ``x: R->V`` and ``out: P->R``."""
    if module.lookup:
        yield f"row numbers in {module.lookup}"
    for name, value in module.attributes.items():
        yield f"{name} = {value}"
    for one in module.rewrites:
        yield f"rewritten {one}"
    if module.draws:
        yield f"draws {module.draws.replace('_', ' ')}"
    for name, conversion in module.inputs.items():
        yield f"{name}: {conversion}" + (" (shared)" if name in module.share else "")
    for path, conversion in module.outputs.items():
        yield f"out{'.' if path else ''}{path}: {conversion}"
    for key, conversion in module.sequence.items():
        side, _, path = key.partition(":")
        if side in ("inputs", "outputs"):
            name = path if side == "inputs" else f"out{'.' if path else ''}{path}"
            yield f"{name}: {conversion or 'as it is'} (sequence)"
    for path, conversion in module.returns.items():
        yield f"out{'.' if path else ''}{path}: {conversion} if the model returns it"


def _distinct(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))
