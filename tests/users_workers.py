"""What the ranks run to see whether a sharded model still does what users do with a model."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from models import hf
from torch import Tensor, nn

from autoshard.api import parallelize
from autoshard.api import plan as make_plan

IDS = torch.tensor([[3, 7, 11, 2], [9, 1, 4, 30]])


def language(kind: str, **options: Any) -> Any:
    """A tiny language model in float64, every value random."""
    import transformers

    torch.manual_seed(0)
    if kind == "GPT2":
        config = transformers.GPT2Config(
            vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, eos_token_id=63, bos_token_id=63, **options
        )
        model: Any = transformers.GPT2LMHeadModel(config)
    else:
        model = hf(kind, eos_token_id=63, **options)
    model = model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def pair(kind: str, **options: Any) -> tuple[Any, Any]:
    """The model in one process, and the same one sharded over two tp ranks."""
    whole = language(kind, **options)
    plan = make_plan(whole, world=2, tp=2, example_inputs={"input_ids": IDS})
    assert plan.coverage.parameter_bytes > 0.5
    return whole, parallelize(copy.deepcopy(whole), plan)


def everywhere(value: Any) -> bool:
    """Whether all ranks have an equal value."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value)
    return all(answer == answers[0] for answer in answers)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max()) if got.shape == wanted.shape else float("inf")


def generated(kind: str, sample: bool, use_cache: bool) -> dict[str, Any]:
    """Tokens from one prompt, each model with the same seed; and what the decoder was called with."""
    whole, model = pair(kind)
    found, lengths = [], []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for one in (whole, model):
        torch.manual_seed(5)
        tokens = one.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=sample, use_cache=use_cache,
            pad_token_id=0, top_k=0,
        )  # fmt: skip
        found.append(tokens.tolist())
    handle.remove()
    return {"equal": found[0] == found[1], "everywhere": everywhere(found[1]), "lengths": lengths, "tokens": found[1]}


def details(kind: str, asked: bool) -> dict[str, float]:
    """Errors of what a model gives on request; ``asked`` says whether it was planned with that request."""
    whole = language(kind, attn_implementation="eager")
    wants = {"output_attentions": True, "output_hidden_states": True}
    given = {"input_ids": IDS, **(wants if asked else {})}
    model = parallelize(copy.deepcopy(whole), make_plan(whole, world=2, tp=2, example_inputs=given))
    got, wanted = model(IDS, **wants), whole(IDS, **wants)
    found = {"logits": error(got.logits, wanted.logits)}
    for name in ("attentions", "hidden_states"):
        found[name] = max(map(error, got[name], wanted[name]))
        assert len(got[name]) == len(wanted[name]) > 0
    return found


class Encoder(nn.Module):
    """Has a second way in that is not its forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 16)
        self.up, self.down, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(24) * 0.7)

    def encode(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return x + self.down(torch.tanh(self.up(x) * self.scale))  # type: ignore[no-any-return]

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encode(ids))  # type: ignore[no-any-return]


def methods() -> dict[str, Any]:
    """A method that is not forward; two forwards and one backward of their sum; both, against one process."""
    from autoshard.executor.whole import full_gradients

    whole = Encoder().double()
    plan = make_plan(whole, world=2, tp=2, example_inputs=(IDS,))
    model = parallelize(copy.deepcopy(whole), plan)
    losses = []
    for one in (whole, model):
        a, b = one(IDS), one(IDS.flip(0) % 8)
        losses.append((a * b).sum() + one.encode(IDS).pow(2).sum())
        losses[-1].backward()
    gradients = full_gradients(model)
    found: dict[str, Any] = {n: error(gradients[n], p.grad) for n, p in whole.named_parameters()}
    return {**found, "loss": error(*losses)}
