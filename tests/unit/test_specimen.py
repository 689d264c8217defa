"""The specimen: random values in float64, shallow and narrow where the model is big and its code follows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Decoder, hf
from torch import Tensor, nn
from verify_models import Block, Everything, Mixture, Mlp, Stack

import autoshard
from autoshard.errors import InvalidArgument
from autoshard.plans import Plan
from autoshard.proving.analysis import Analysis
from autoshard.proving.specimen import Specimen, fit, make_specimen


def specimen_of(model: nn.Module, tp: int = 2, **options: Any) -> Specimen:
    analysis = Analysis(model, tp, None)
    return make_specimen(model, tp, lambda: analysis.placed, **options)


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = make()
    return model


class Loose(nn.Module):
    """Holds a module and a tensor where no module registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.loose: list[Any] = [nn.Linear(8, 8), {"scale": torch.ones(8)}]

    def forward(self, x: Tensor) -> Tensor:
        linear, held = self.loose
        return self.down(self.up(linear(x) * held["scale"]).relu())  # type: ignore[no-any-return]


# values


def test_values_are_perturbed_copies_in_float64_and_the_model_is_left_alone() -> None:
    model = Everything().train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    specimen = specimen_of(model)
    assert specimen.shrunk == ()
    assert not specimen.model.training
    for name, parameter in specimen.model.named_parameters():
        assert parameter.dtype == torch.float64
        assert parameter.requires_grad == dict(model.named_parameters())[name].requires_grad
        distance = (parameter.detach() - before[name]).abs()
        assert bool((distance > 0).all())
        assert float(distance.max()) < float(before[name].std()) + 1
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert model.training


def test_ones_and_zeros_are_perturbed_too() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    copied = specimen_of(model).model
    for name in ("0.weight", "0.bias"):
        assert float(copied.get_parameter(name).detach().std()) > 0.01


def test_buffers_keep_their_values_and_ties_stay_ties() -> None:
    model = Everything()
    copied = specimen_of(model).model
    assert torch.equal(copied.get_buffer("offset"), model.get_buffer("offset").double())
    assert torch.equal(copied.get_buffer("flags"), model.get_buffer("flags"))
    assert copied.get_parameter("head.weight") is copied.get_parameter("table.weight")


def test_plain_tensor_attributes_are_copied_in_float64() -> None:
    model = Mlp()
    model.scale = torch.ones(3)
    assert specimen_of(model).model.scale.dtype == torch.float64


def test_what_no_module_has_registered_is_copied_in_float64() -> None:
    model = Loose()
    copied = specimen_of(model).model
    assert isinstance(copied, Loose)
    linear, held = copied.loose
    assert held["scale"].dtype == torch.float64
    assert isinstance(linear.weight, nn.Parameter)
    assert torch.equal(linear.weight, model.loose[0].weight.double())
    assert linear.bias.requires_grad
    assert model.loose[0].weight.dtype == torch.float32
    given = (torch.randn(2, 3, 8),)
    assert autoshard.verify(model, autoshard.plan(model, world=2, tp=2, example_inputs=given), example_inputs=given).ok


def test_the_same_seed_gives_the_same_values() -> None:
    model = Mlp()
    one, same, other = (specimen_of(model, seed=seed).model.get_parameter("up.weight") for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


# sizes


def test_a_small_model_is_not_shrunk_and_needs_no_analysis() -> None:
    def never() -> Any:
        raise AssertionError("a small model needs no analysis")

    assert make_specimen(Mlp(), 2, never).shrunk == ()


def test_a_published_size_becomes_two_narrow_blocks() -> None:
    sizes = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    model = on_meta(lambda: hf("Llama", **sizes, **heads))
    plan = autoshard.plan(model, world=8, tp=4)
    specimen = specimen_of(model, tp=4)
    assert len(specimen.model.get_submodule("model.layers")._modules) == 2
    shapes = {name: tuple(p.shape) for name, p in specimen.model.named_parameters()}
    assert shapes["model.layers.1.self_attn.q_proj.weight"] == (4096, 64)
    assert shapes["model.layers.1.mlp.up_proj.weight"] == (8, 64)
    assert shapes["model.embed_tokens.weight"] == (32, 64)
    assert "model.layers: only 0-1 of 0-31" in specimen.shrunk
    assert "an extent of 14336 is 8" in specimen.shrunk
    fitted = fit(plan, specimen)
    assert fitted.mesh.world == 4
    assert set(fitted.parameters) == {n for n, _ in specimen.model.named_parameters(remove_duplicate=False)}


def kept(model: nn.Module) -> list[str]:
    return list(specimen_of(model).model.get_submodule("blocks")._modules)


def test_two_of_each_kind_of_block_are_kept_wherever_they_are() -> None:
    def kinds() -> nn.Module:
        inner = [64] * 5 + [32] * 2 + [64, 32]
        return Stack([Block(number, size) for number, size in enumerate(inner)])

    assert kept(on_meta(kinds)) == ["0", "1", "5", "6"]


def test_a_kind_may_be_told_by_an_attribute_but_not_by_the_place() -> None:
    def kinds() -> nn.Module:
        return Stack([Block(number, scale=0.5 if number == 3 else 1.0) for number in range(6)])

    assert kept(on_meta(kinds)) == ["0", "1", "3"]


def test_code_that_needs_all_its_blocks_keeps_them_and_is_still_narrowed() -> None:
    specimen = specimen_of(on_meta(lambda: Mixture([Block(number) for number in range(5)])))
    assert len(specimen.model.get_submodule("blocks")._modules) == 5
    assert tuple(specimen.model.get_parameter("blocks.4.up.weight").shape) == (4, 64)
    assert specimen.shrunk == ("an extent of 64 is 4", "an extent of 128 is 64")


class Literal(nn.Module):
    """Its width is written out in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 8192, bias=False), nn.Linear(8192, 4096, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x))).view(x.shape[0], -1, 4096)


def test_a_size_written_out_in_the_code_is_kept() -> None:
    specimen = specimen_of(on_meta(Literal))
    assert tuple(specimen.model.get_parameter("up.weight").shape) == (4, 4096)


class Huge(nn.Module):
    """Nothing of it can be cut, and its width is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(40000, 40000))

    def forward(self, x: torch.Tensor) -> Any:
        return (x @ self.weight.softmax(-1).softmax(0)).view(x.shape[0], -1, 40000)


def test_what_is_too_big_to_be_run_is_refused_with_its_size() -> None:
    with pytest.raises(InvalidArgument, match="1,600,000,000 parameters"):
        specimen_of(on_meta(Huge))


def test_a_shrunk_specimen_finds_the_same_fault() -> None:
    model = on_meta(lambda: Decoder(layers=6, head_norm=True))
    plan = autoshard.plan(model, world=2, tp=2)
    assert autoshard.verify(model, plan).ok
    data = plan.to_dict()
    for layer in range(6):
        data["parameters"][f"blocks.{layer}.attention.k_norm.weight"]["grad_sum"] = None
    proof = autoshard.verify(model, Plan.from_dict(data))
    assert {(c.kind, c.fqn) for c in proof.culprits} == {
        ("gradient sum", f"blocks.{layer}.attention.k_norm.weight") for layer in range(2)
    }
