"""Give everything in a model a random name: what is inferred from data flow alone stays the same.

Renamed: every parameter, buffer and child module of every module, and every class. Not renamed: the numbers of
``ModuleList`` and ``Sequential`` and the keys of ``ModuleDict``, by which code finds children; attributes that are not
parameters, buffers or modules; and torch's own attention and transformer layers, whose compiled code reads the names.
"""

from __future__ import annotations

import random
import string
from typing import Any

from torch import nn

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_COMPILED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def rename(model: nn.Module, generator: random.Random) -> dict[str, str]:
    """Rename in place; return the new full name of each parameter by its old one, all names of tied ones."""
    before = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    renamed: dict[type[nn.Module], type[nn.Module]] = {}
    for module in list(model.modules()):
        kind = type(module)
        if kind in _COMPILED:
            continue
        if not isinstance(module, _CONTAINERS):
            aliases = {name: _word(generator) for name in [*module._parameters, *module._buffers, *module._modules]}
            for table in (module._parameters, module._buffers, module._modules):
                _rekey(table, aliases)
            module._non_persistent_buffers_set = {aliases[name] for name in module._non_persistent_buffers_set}
            module.__dict__["_aliases"] = aliases
        if kind not in renamed:
            renamed[kind] = type(_word(generator), (kind,), {"__getattr__": _find})
        module.__class__ = renamed[kind]
    after = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return dict(zip(before, after, strict=True))


def _rekey(table: dict[str, Any], aliases: dict[str, str]) -> None:
    for name in list(table):
        table[aliases[name]] = table.pop(name)


def _find(self: nn.Module, wanted: str) -> object:
    """Let the module's own code find what it knows under its old name."""
    alias = self.__dict__.get("_aliases", {}).get(wanted)
    # a module that is sharded reads its parameters through properties, by their new names
    return nn.Module.__getattr__(self, wanted) if alias is None else getattr(self, alias)


def _word(generator: random.Random) -> str:
    return "".join(generator.choices(string.ascii_lowercase, k=10))
