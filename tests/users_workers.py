"""What the ranks run to see whether a sharded model still does what users do with a model."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import hf
from torch import Tensor, nn

from autoshard.api import parallelize
from autoshard.api import plan as make_plan
from autoshard.executor.whole import full_gradients
from autoshard.plans import Plan

Change = Callable[[Plan], Plan]

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


def pair(kind: str, change: Change = lambda plan: plan, **options: Any) -> tuple[Any, Any]:
    """The model in one process, and the same one sharded over two tp ranks."""
    whole = language(kind, **options)
    plan = make_plan(whole, world=2, tp=2, example_inputs={"input_ids": IDS})
    assert plan.coverage.parameter_bytes > 0.5
    return whole, parallelize(copy.deepcopy(whole), change(plan))


def without(plan: Plan, fact: str) -> Plan:
    """The plan with one kind of fact taken out of every module."""
    empty: Any = {}
    modules = {pattern: dataclasses.replace(module, **{fact: empty}) for pattern, module in plan.modules.items()}
    return dataclasses.replace(plan, modules=modules)


def everywhere(value: Any) -> bool:
    """Whether all ranks have an equal value."""
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value)
    return all(answer == answers[0] for answer in answers)


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).detach().abs().max()) if got.shape == wanted.shape else float("inf")


def generated(kind: str, sample: bool) -> dict[str, Any]:
    """Tokens from one prompt, each model with the same seed; and how much of them each call was given."""
    whole, model = pair(kind)
    found, lengths = [], []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for one in (whole, model):
        torch.manual_seed(5)
        tokens = one.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=sample, use_cache=True,
            pad_token_id=0, top_k=0,
        )  # fmt: skip
        found.append(tokens.tolist())
    return {"equal": found[0] == found[1], "everywhere": everywhere(found[1]), "lengths": lengths}


def shares_of_weights() -> tuple[int, int]:
    """Heads of the attention weights that a model returns whose plan does not say how they become whole; and all."""
    whole, model = pair("Llama", lambda plan: without(plan, "returns"), attn_implementation="eager")
    got, wanted = (one(IDS, output_attentions=True).attentions[0].shape[1] for one in (model, whole))
    return got, wanted


def details(kind: str) -> dict[str, float]:
    """Errors of what a model gives on request, though it was planned without the request."""
    whole, model = pair(kind, attn_implementation="eager")
    wants = {"output_attentions": True, "output_hidden_states": True}
    got, wanted = model(IDS, **wants), whole(IDS, **wants)
    found = {"logits": error(got.logits, wanted.logits)}
    for name in ("attentions", "hidden_states"):
        assert len(got[name]) == len(wanted[name]) > 0
        found[name] = max(map(error, got[name], wanted[name]))
    # a loss of the weights themselves
    for answer in (wanted, got):
        (answer.logits.sum() + sum(w.pow(2).sum() for w in answer.attentions)).backward()
    return {**found, **gradient_errors(whole, model)}


def gradient_errors(whole: nn.Module, model: nn.Module) -> dict[str, float]:
    """The error of each gradient, relative to its largest magnitude."""
    gradients, found = full_gradients(model), {}
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        got, wanted = gradients[name], parameter.grad
        assert got is not None and wanted is not None, name
        found[f"gradient of {name}"] = error(got, wanted) / float(wanted.abs().max().clamp_min(1e-3))
    return found


class Encoder(nn.Module):
    """Has a second way in that is not its forward."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16) if norm else nn.Identity()
        self.up, self.down, self.head = nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 8)
        self.double()

    def encode(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return x + self.down(torch.tanh(self.up(self.norm(x))))  # type: ignore[no-any-return]

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encode(ids))  # type: ignore[no-any-return]


def encoder(norm: bool, overrides: dict[str, str]) -> tuple[Encoder, Encoder]:
    whole = Encoder(norm)
    plan = make_plan(whole, world=2, tp=2, example_inputs=(IDS,), overrides=overrides)
    model = copy.deepcopy(whole)
    parallelize(model, plan)
    return whole, model


def method(norm: bool, overrides: dict[str, str]) -> dict[str, float]:
    """A method that is not forward, and the backward of what it gives."""
    whole, model = encoder(norm, overrides)
    answers = [one.encode(IDS) for one in (whole, model)]
    found = {"answer": error(answers[1], answers[0])}
    for one, answer in zip((whole, model), answers, strict=True):
        (answer.pow(2).sum() + one(IDS).sum()).backward()
    return {**found, **gradient_errors(whole, model)}


def twice() -> dict[str, float]:
    """Two forwards, on batches of two lengths, and one backward of their product."""
    whole, model = pair("Llama")
    losses = [(one(IDS).logits.mean(1) * one(IDS[:, :2] % 8).logits.mean(1)).sum() for one in (whole, model)]
    for loss in losses:
        loss.backward()
    return {"loss": error(losses[1], losses[0]), **gradient_errors(whole, model)}


def evaluated_first(kind: str) -> dict[str, float]:
    """Evaluation in both ways, then training: nothing made in inference may reach autograd."""
    whole, model = pair(kind)
    found = {}
    for name, mode in (("no_grad", torch.no_grad), ("inference_mode", torch.inference_mode)):
        with mode():
            found[name] = error(model(IDS).logits, whole(IDS).logits)
    for one in (whole.train(), model.train()):
        drop(one)
        one(IDS).logits.pow(2).sum().backward()
    return {**found, **gradient_errors(whole, model)}


def drop(model: nn.Module) -> None:
    """Switch dropout off: this is not about random numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0


def hooked() -> tuple[dict[str, float], list[str]]:
    """What hooks see of values and gradients, and what they change; and what is said of those in a region."""
    whole, model = pair("Llama")
    seen: list[dict[str, Tensor]] = []
    for one in (whole, model):
        notes: dict[str, Tensor] = {}
        block = one.model.layers[0]
        block.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
        block.mlp.register_forward_hook(lambda module, args, out, notes=notes: notes.update(mlp=out.detach()))
        block.register_full_backward_hook(
            lambda module, ins, outs, notes=notes: notes.update(into=ins[0].detach(), back=outs[0].detach())
        )
        one.lm_head.register_forward_hook(lambda module, args, out: out + 1)
        one(IDS).logits.pow(2).sum().backward()
        seen.append(notes)
    assert seen[0].keys() == seen[1].keys() == {"mlp", "into", "back"}
    found = {**{k: error(seen[1][k], seen[0][k]) for k in seen[0]}, **gradient_errors(whole, model)}
    model.model.layers[0].mlp.register_full_backward_hook(lambda module, ins, outs: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(IDS)
    return found, [str(one.message) for one in caught if "hooks on the gradients" in str(one.message)]


def autocast() -> dict[str, float]:
    """Errors of outputs and gradients under autocast to bfloat16, of a float32 model."""
    whole = language("Llama").float()
    model = parallelize(copy.deepcopy(whole), make_plan(whole, world=2, tp=2, example_inputs={"input_ids": IDS}))
    answers = []
    for one in (whole, model):
        with torch.autocast("cpu", torch.bfloat16):
            answers.append(one(IDS).logits)
        answers[-1].float().pow(2).mean().backward()
    assert answers[0].dtype == answers[1].dtype == torch.bfloat16
    scale = float(answers[0].abs().max())
    return {"logits": error(answers[1].float(), answers[0].float()) / scale, **gradient_errors(whole, model)}
