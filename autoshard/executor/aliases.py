"""Parameters that a module keeps a second time, in a plain attribute: they would go on unsharded, and untrained.

A list or tuple of a module's own parameters (recurrent layers keep one for their kernels) is read through like the
parameters themselves. Any other second reference is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from autoshard.errors import InvalidArgument

Places = tuple[str | None, ...]


def own_lists(module: nn.Module) -> dict[str, tuple[type, Places]]:
    """Return the attributes that are a list or tuple of the module's own parameters: its type, and each one's name.

    A place that holds something else has the name None.
    """
    names = {id(p): name for name, p in module._parameters.items() if p is not None}
    found: dict[str, tuple[type, Places]] = {}
    for attribute, value in module.__dict__.items():
        if type(value) in (list, tuple) and any(id(item) in names for item in value):
            found[attribute] = (type(value), tuple(names.get(id(item)) for item in value))
    return found


def check_aliases(model: nn.Module, reads_local: bool) -> None:
    """Refuse second references to parameters that applying a plan would leave behind.

    Args:
        model: not sharded yet.
        reads_local: whether modules will read through ``held``, which follows their own lists.

    Raises:
        InvalidArgument: naming the module and the attribute.
    """
    parameters = {id(p): name for name, p in model.named_parameters()}
    for fqn, module in model.named_modules():
        follows = reads_local or _hears_assignments(type(module))
        lists = own_lists(module) if follows else {}
        for attribute, value in module.__dict__.items():
            if attribute in _OWN or attribute in lists:
                continue
            for item in _inside(value):
                if id(item) in parameters:
                    raise InvalidArgument(
                        f"a parameter is kept in the plain attribute {attribute!r} too, which would stay unsharded",
                        at=f"{fqn or 'the model'}: {parameters[id(item)]}",
                        help="read it from its module instead of keeping a reference",
                    )


def _hears_assignments(kind: type) -> bool:
    """Whether the class overrides ``__setattr__``: FSDP then assigns its parameters through it."""
    kinds = kind.__mro__[: kind.__mro__.index(nn.Module)]
    return any("__setattr__" in each.__dict__ for each in kinds)


_OWN = {"_parameters", "_buffers", "_modules"}


def _inside(value: Any) -> Iterator[Any]:
    """Yield the value, and what a plain container holds."""
    yield value
    if isinstance(value, (list, tuple, set)):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()
