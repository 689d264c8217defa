"""Which config and model classes belong to a model type of transformers."""

from __future__ import annotations

import importlib
import inspect
import os
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers
from transformers import PretrainedConfig, PreTrainedModel

ROOT = Path(transformers.__file__).parent / "models"

# types whose model class no table of transformers names
_NAMED = {"t5_gemma_module": ("t5gemma", "T5GemmaEncoder")}

_TASKS = """
CAUSAL_LM SEQ_TO_SEQ_CAUSAL_LM IMAGE_TEXT_TO_TEXT MULTIMODAL_LM SPEECH_SEQ_2_SEQ MASKED_LM CTC IMAGE_CLASSIFICATION
OBJECT_DETECTION SEMANTIC_SEGMENTATION ZERO_SHOT_IMAGE_CLASSIFICATION - PRETRAINING
""".split()


@cache
def config_index() -> dict[str, list[Any]]:
    """Return the config classes of every type; some have several."""
    found: dict[str, list[Any]] = {}
    for file in sorted(ROOT.glob("*/configuration_*.py")):
        name = f"transformers.models.{file.parent.name}.{file.stem}"
        if file.stem == "configuration_auto":
            continue
        for kind in vars(importlib.import_module(name)).values():
            if inspect.isclass(kind) and issubclass(kind, PretrainedConfig) and kind.__module__ == name:
                found.setdefault(getattr(kind, "model_type", ""), []).append(kind)
    return found


def config_class(model_type: str) -> Any:
    """Return the config class of a type: its own, and one that has a hand plan if there is one."""
    found = config_index()[model_type]
    found = [c for c in found if c.__dict__.get("model_type") == model_type] or found
    planned = [c for c in found if c.__dict__.get("base_model_tp_plan")]
    return (planned or found)[0]


def plan_types() -> list[str]:
    """Return the types that have a hand plan of their own."""
    return sorted(
        {t for t, kinds in config_index().items() if any(c.__dict__.get("base_model_tp_plan") for c in kinds)}
    )


def model_class(config: Any) -> Any:
    """Return the model class of a config class: with a language head if there is one.

    Raises:
        LookupError: there is none.
    """
    if config.model_type in _NAMED:
        package, name = _NAMED[config.model_type]
        return getattr(importlib.import_module(f"transformers.models.{package}.modeling_{package}"), name)
    return _from_tables(config) or _from_modules(config)


def _from_tables(config: Any) -> Any:
    from transformers.models.auto import modeling_auto

    for task in _TASKS:
        table = "MODEL_MAPPING_NAMES" if task == "-" else f"MODEL_FOR_{task}_MAPPING_NAMES"
        named = getattr(modeling_auto, table, {}).get(config.model_type)
        if named is None:
            continue
        found = getattr(transformers, named if isinstance(named, str) else named[0], None)
        if found is None or getattr(found, "__module__", "").startswith("transformers.utils"):
            continue
        own = getattr(found, "config_class", None)
        # some configs come without models of their own
        lone = not list((ROOT / config.__module__.split(".")[2]).glob("modeling_*.py"))
        if own is config or (own is not None and lone):
            return found
    return None


def _from_modules(config: Any) -> Any:
    package = config.__module__.rsplit(".", 1)[0]
    found = []
    for file in (ROOT / package.rsplit(".", 1)[1]).glob("modeling_*.py"):
        module = importlib.import_module(f"{package}.{file.stem}")
        for name, kind in vars(module).items():
            own = inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and kind.__module__ == module.__name__
            if own and getattr(kind, "config_class", None) is config and "PreTrained" not in name:
                found.append(kind)
    if not found:
        raise LookupError(f"no model class for {config.__name__}")
    return min(found, key=lambda kind: _rank(kind.__name__))


def _rank(name: str) -> int:
    if "ForCausalLM" in name:
        return 0
    if "ForConditional" in name:
        return 1
    return 2 if name.endswith("Model") else 3
