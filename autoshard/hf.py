"""The optional bridge to transformers: a model from its published config, on the meta device."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.errors import TargetError
from autoshard.user_code import blamed


def build_from_config(path: Path) -> nn.Module:
    """Build the model that a ``config.json`` describes: nothing is downloaded, no weight is allocated.

    Args:
        path: the file, or the folder that holds it.

    Raises:
        TargetError: there is no such file, transformers is missing, or it does not know the model.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise TargetError(f"there is no file {file}", help="give the path of a model's config.json")
    if importlib.util.find_spec("transformers") is None:
        raise TargetError(f"{file} needs transformers", help="pip install autoshard[hf]")
    with blamed(str(file)):
        return _build(file)


def _build(file: Path) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    kind = getattr(transformers, _first(config.architectures), None)
    with torch.device("meta"), _default_dtype(config.dtype):
        if kind is None:
            return _checked(transformers.AutoModelForCausalLM.from_config(config))
        return _checked(kind(config))


def _first(names: Any) -> str:
    return str(names[0]) if names else ""


def _checked(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TargetError(f"transformers built a {type(model).__name__}, not a torch.nn.Module")
    return model


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Make new parameters of ``dtype``: casting a finished model would break its ties."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
