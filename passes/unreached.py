"""Say which modules the traced forward never called, how much they hold, and which arguments it was not given.

A tower for images is not in the graph where no images were given, and nothing in it is cut. That is no fault of the
model: other example inputs may reach it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import Tensor, nn

from autoshard.ir import Traced
from autoshard.words import fold_names, percent

#: The share of parameter bytes below which a module that is not called is no news: a head that is not asked for.
_LEAST = 0.01
_SHOWN = 4


def unreached(model: nn.Module, traced: Traced) -> str | None:
    """Return a sentence on the modules that the forward never called; None where they hold next to nothing."""
    names = list(_outermost(model, traced))
    total = _bytes(list(model.parameters()))
    share = _bytes([p for name in names for p in model.get_submodule(name).parameters()]) / max(total, 1)
    if share < _LEAST:
        return None
    folded = fold_names(names)
    more = f" and {len(folded) - _SHOWN} more" if len(folded) > _SHOWN else ""
    absent = ", ".join(_absent(model, traced))
    hint = f" (it was not given {absent})" if absent else ""
    return (
        f"the traced forward never calls {', '.join(folded[:_SHOWN])}{more}, {percent(share)} of the parameter bytes: "
        f"nothing there is cut over tp; pass example_inputs with which it does{hint}"
    )


def _outermost(model: nn.Module, traced: Traced) -> Iterator[str]:
    """Yield the outermost modules none of whose parameters the graph reads; not in code that was not traced."""
    named = dict(model.named_parameters(remove_duplicate=False))
    used = {id(named[p.fqn]) for p in traced.parameters if p.value and p.fqn in named}
    known = {call.fqn for call in traced.calls}
    found: list[str] = []
    for name, module in model.named_modules():
        if not name or name in known or _inside(name, found):
            continue
        own = {id(p) for p in module.parameters()}
        if not own or own & used:
            continue
        if not _inside(name, [part.fqn for part in traced.untraced]):
            found.append(name)
            yield name


def _inside(name: str, modules: list[str]) -> bool:
    return any(not one or name == one or name.startswith(one + ".") for one in modules)


def _absent(model: nn.Module, traced: Traced) -> Iterator[str]:
    """Yield the arguments of the forward that the example inputs leave out, or give as None."""
    given = {name for name, value in traced.inputs.kwargs.items() if value is not None}
    for number, one in enumerate(inspect.signature(model.forward).parameters.values()):
        left_out = number >= len(traced.inputs.args) and one.name not in given
        if left_out and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            yield one.name


def _bytes(tensors: list[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())
