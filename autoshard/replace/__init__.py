"""Modules of torch that no cut can run in, replaced in place by equivalents.

An instance keeps its parameters, buffers, hooks, mode and state-dict keys: only its class, or one attribute, changes.
What is known here is the behaviour of torch's own classes. A subclass, an instance with a forward of its own, and an
attention whose projection is no plain linear are left alone: their code may do anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from autoshard.errors import PlanMismatch, near
from autoshard.patterns import unfold
from autoshard.plans import Replacement
from autoshard.replace.attention import Attention
from autoshard.replace.stacks import Decoder, Encoder

_WHYS = {
    "attention": "torch computes it in one call that checks global sizes: here its heads can be cut",
    "layer": "its fused kernel for inference reads whole weights: the layer runs op by op",
    "encoder": "its layers take no nested tensors: in inference, padded places keep what the layers make of them",
    "decoder": "a trace cannot look into a mask to see whether it is causal",
}
_CLASSES: dict[type[nn.Module], tuple[str, type[nn.Module]]] = {
    nn.MultiheadAttention: ("attention", Attention),
    nn.TransformerEncoderLayer: ("layer", nn.TransformerEncoderLayer),
    nn.TransformerEncoder: ("encoder", Encoder),
    nn.TransformerDecoder: ("decoder", Decoder),
}


def find(model: nn.Module) -> tuple[Replacement, ...]:
    """Return what ``apply`` would replace in ``model``, by first name; what is replaced already is not found again."""
    found = []
    for fqn, module in model.named_modules():
        kind = _kind(module)
        if kind is not None:
            found.append(Replacement(fqn, kind, _WHYS[kind]))
    return tuple(found)


def apply(model: nn.Module, replacements: Iterable[Replacement]) -> None:
    """Replace modules of ``model`` in place; what is replaced already stays as it is.

    Raises:
        PlanMismatch: as ``check``; nothing is changed.
    """
    replacements = tuple(replacements)
    check(model, replacements)
    for fqn, kind in _each(replacements):
        module = model.get_submodule(fqn)
        if _kind(module) is None:
            continue
        module.__class__ = _CLASSES[type(module)][1]
        if kind == "layer":
            module.activation_relu_or_gelu = 0  # type: ignore[assignment]
        elif kind == "encoder":
            module.use_nested_tensor = False  # type: ignore[assignment]


def check(model: nn.Module, replacements: Iterable[Replacement]) -> None:
    """Refuse replacements that do not fit the model; change nothing.

    Raises:
        PlanMismatch: the model has no such module, or it is of another kind, or was changed since.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for fqn, kind in _each(replacements):
        if fqn not in modules:
            raise PlanMismatch(f"the model has no module {fqn}", help=near(fqn, modules))
        if kind not in (_kind(modules[fqn]), _kind_before(modules[fqn])):
            raise PlanMismatch(
                f"the plan replaces this module as torch's own {kind}, and it is not one",
                at=fqn,
                got=f"{type(modules[fqn]).__name__}; kinds: {', '.join(_WHYS)}",
                help="make the plan from this model",
            )


def _each(replacements: Iterable[Replacement]) -> Iterator[tuple[str, str]]:
    return ((fqn, one.kind) for one in replacements for fqn in unfold(one.fqn))


def _kind(module: nn.Module) -> str | None:
    """Return what kind of replacement a module still needs, None for none."""
    kind, _ = _CLASSES.get(type(module), (None, None))
    if kind is None or "forward" in module.__dict__:
        return None
    if isinstance(module, nn.MultiheadAttention):
        return kind if _plain_linear(module.out_proj) else None
    if isinstance(module, nn.TransformerEncoderLayer):
        return kind if module.activation_relu_or_gelu else None
    return kind


def _kind_before(module: nn.Module) -> str | None:
    """Return what kind of replacement a module is."""
    if type(module) is nn.TransformerEncoderLayer and not module.activation_relu_or_gelu:
        return "layer"
    return next((kind for kind, made in _CLASSES.values() if type(module) is made and kind != "layer"), None)


def _plain_linear(module: nn.Module) -> bool:
    """Whether calling it does no more than torch, which reads its weight and bias past it."""
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__
    return type(module) in (nn.Linear, NonDynamicallyQuantizableLinear) and not hooked
