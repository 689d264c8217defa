"""Inputs are found for models that say nothing about them, and are taken as they are where they are given."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from autoshard.errors import InputsNotFound, InvalidArgument
from autoshard.inputs import ExampleInputs, example_inputs, materialise
from autoshard.outputs import tensors

B, S = "batch", "sequence"


def fake_twin(model: nn.Module) -> nn.Module:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = {}
    with mode:
        for p in model.parameters():
            memo[id(p)] = nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="cpu"), requires_grad=p.requires_grad)
        for b in model.buffers():
            memo[id(b)] = torch.empty(b.shape, dtype=b.dtype, device="cpu")
    return copy.deepcopy(model, memo)


def shapes(found: ExampleInputs) -> dict[str, tuple[int, ...]]:
    return {path: tuple(t.shape) for path, t in [*tensors(found.args), *tensors(found.kwargs)]}


class Mlp(nn.Module):
    def __init__(self, *before: nn.Module, width: int = 24) -> None:
        super().__init__()
        self.net = nn.Sequential(*before, nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Decoder(nn.Module):
    """Ids, a table of positions, causal attention, an optional mask and a loss that nobody asked for."""

    def __init__(self, longest: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(37, 16), nn.Embedding(longest, 16)
        self.qkv, self.out, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 37)

    def forward(self, tok: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        b, t = tok.shape
        x = self.tokens(tok) + self.positions(torch.arange(t))
        q, k, v = (part.view(b, t, 4, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, 16)
        return self.head(self.out(y))


class ConventionalDecoder(Decoder):
    def forward(self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None) -> Any:  # type: ignore[override]
        assert input_ids is not None and attention_mask is not None
        if attention_mask.all():
            return super().forward(input_ids)
        raise ValueError("left padding is not supported")


class Asserting(Decoder):
    def forward(self, idx: Tensor) -> Any:  # type: ignore[override]
        assert idx.shape[1] <= 8, f"cannot forward {idx.shape[1]} tokens, the block size is only 8"
        return super().forward(idx)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(50, 16), nn.Embedding(60, 16)
        self.body = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)

    def forward(self, src: Tensor, tgt: Tensor) -> Any:
        return self.body(self.source(src), self.target(tgt))


class Cross(nn.Module):
    """Keyword-only; the context is optional but its width is not the width of the states."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(32, 16), nn.Linear(24, 32)

    def forward(self, *, states: Tensor, context: Tensor | None = None, scale: float = 1.0, flag: bool) -> Any:
        k, v = self.kv(states if context is None else context).chunk(2, -1)
        return F.scaled_dot_product_attention(self.q(states), k, v) * scale


class Vit(nn.Module):
    def __init__(self, side: int = 56, patch: int = 14) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, 16))
        self.positions = nn.Parameter(torch.zeros(1, (side // patch) ** 2 + 1, 16))

    def forward(self, img: Tensor) -> Any:
        x = self.patches(img).flatten(2).transpose(1, 2)
        return torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.positions


class LeNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.head = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5), nn.Linear(400, 10)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.max_pool2d(self.c2(F.max_pool2d(self.c1(x), 2)), 2).flatten(1))


class Audio(nn.Module):
    """Raw samples, strided convolutions without padding: short signals have no frame at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(1, 8, 10, 5), nn.Conv1d(8, 8, 8, 4)

    def forward(self, samples: Tensor) -> Any:
        return self.b(F.gelu(self.a(samples[:, None])))


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.time, self.text = nn.Conv2d(4, 16, 3, padding=1), nn.Linear(16, 16), nn.Linear(24, 16)

    def forward(self, sample: Tensor, timestep: Tensor, states: Tensor) -> Any:
        angles = timestep[:, None].float() * torch.exp(-math.log(1e4) * torch.arange(8) / 8)[None]
        added = self.time(torch.cat([angles.sin(), angles.cos()], -1)) + self.text(states).mean(1)
        return self.conv(sample) + added[:, :, None, None]


class RotaryBlock(nn.Module):
    """A decoder layer as it is called from inside a model: the rotation comes as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Any:
        cos, sin = position_embeddings
        q = self.q(x).view(*x.shape[:2], 4, 8).transpose(1, 2)
        q = q * cos.unsqueeze(1) + torch.cat([-q[..., 4:], q[..., :4]], -1) * sin.unsqueeze(1)
        return self.o(q.transpose(1, 2).flatten(2))


class BatchDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Embedding(50, 16), nn.Linear(20, 8)

    def forward(self, batch: dict[str, Tensor]) -> Any:
        return self.mix(torch.cat([self.table(batch["ids"]), batch["features"]], -1))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.q, self.k = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor, mask: Tensor) -> Any:
        x = self.table(tokens)
        q, k = (f(x).unflatten(-1, (4, 4)).transpose(1, 2) for f in (self.q, self.k))
        return (q @ k.transpose(-1, -2)).masked_fill(mask, -1e9).softmax(-1)


class Routed(nn.Module):
    """The experts that are hit depend on values, and so does a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        flat = x.reshape(-1, 16)
        if int(position_ids.max()) > 4:
            flat = flat * 2
        weight, index = self.gate(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for expert in index.unique().tolist():
            row, slot = (index == expert).nonzero(as_tuple=True)
            out.index_add_(0, row, self.experts[expert](flat[row]) * weight[row, slot, None])
        return out.view_as(x)


class Wrapper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Decoder()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class Started(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.register_buffer("angles", torch.zeros(64, 16))

    def forward(self, tokens: Tensor, start: Any) -> Any:
        return self.table(tokens) + self.get_buffer("angles")[start : start + tokens.shape[1]]


class Dummies(nn.Module):
    """Brings its own inputs, whose values it looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"pairs": torch.tensor([[4, 2, 7], [3, 2, 6]])}

    def forward(self, pairs: Tensor) -> Any:
        if pairs.shape[1] % 3:
            raise ValueError("pairs come with their label")
        return self.table(pairs)


def bf16_mlp() -> nn.Module:
    return Mlp().to(torch.bfloat16)


CASES: list[tuple[Any, dict[str, tuple[int, ...]], dict[str, tuple[str | None, ...]]]] = [
    (Mlp, {"0": (2, 13, 24)}, {"0": (B, S, None)}),
    (bf16_mlp, {"0": (2, 13, 24)}, {"0": (B, S, None)}),
    (lambda: Mlp(nn.Linear(20, 24), nn.BatchNorm1d(24)), {"0": (2, 20)}, {"0": (B, None)}),
    (lambda: Mlp(nn.Flatten(), width=784), {"0": (2, 784)}, {"0": (B, None)}),
    (lambda: Mlp(nn.RMSNorm(24)), {"0": (2, 13, 24)}, {"0": (B, S, None)}),
    (Decoder, {"0": (2, 13), "attention_mask": (2, 13)}, {"0": (B, S), "attention_mask": (B, S)}),
    (lambda: Decoder(longest=8), {"0": (2, 8), "attention_mask": (2, 8)}, {"0": (B, S)}),
    (ConventionalDecoder, {"input_ids": (2, 13), "attention_mask": (2, 13)}, {"attention_mask": (B, S)}),
    (Asserting, {"0": (2, 8)}, {"0": (B, S)}),
    (EncoderDecoder, {"0": (2, 13), "1": (2, 13)}, {"0": (B, S), "1": (B, S)}),
    (Cross, {"states": (2, 13, 32), "context": (2, 13, 24)}, {"states": (B, S, None), "context": (B, S, None)}),
    (Vit, {"0": (2, 3, 56, 56)}, {"0": (B, None, None, None)}),
    (LeNet, {"0": (2, 1, 32, 32)}, {"0": (B, None, None, None)}),
    (Denoiser, {"0": (2, 4, 96, 96), "1": (2,), "2": (2, 13, 24)}, {"0": (B, None, None, None), "1": (B,)}),
    (RotaryBlock, {"0": (2, 13, 32), "1.0": (2, 13, 8), "1.1": (2, 13, 8)}, {}),
    (BatchDict, {"0.ids": (2, 13), "0.features": (2, 13, 4)}, {"0.ids": (B, S), "0.features": (B, S, None)}),
    (Masked, {"0": (2, 13), "1": (2, 1, 13, 13)}, {"1": (B, None, S, S)}),
    (Routed, {"0": (2, 13, 16), "1": (2, 13)}, {"0": (B, S, None), "1": (B, S)}),
    (Wrapper, {"0": (2, 13), "attention_mask": (2, 13)}, {"0": (B, S)}),
    (Started, {"0": (2, 13)}, {"0": (B, S)}),
    (lambda: nn.LSTM(24, 8, batch_first=True), {"0": (2, 13, 24)}, {"0": (B, S, None)}),
    (lambda: nn.Transformer(32, 2, 1, 1, 16), {"0": (2, 13, 32), "1": (2, 13, 32)}, {}),
    (lambda: nn.Sequential(nn.Conv1d(9, 4, 3)), {"0": (2, 9, 13)}, {"0": (B, None, S)}),
    (lambda: nn.Conv3d(3, 4, 3), {"0": (2, 3, 3, 96, 96)}, {"0": (B, None, None, None, None)}),
    (Dummies, {"0": (2, 3)}, {}),
]  # fmt: skip


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
@pytest.mark.parametrize(("build", "expected", "dims"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_inputs_are_found(build: Any, expected: dict[str, Any], dims: dict[str, Any], fake: bool) -> None:
    torch.manual_seed(0)
    model = build().eval()
    found = example_inputs(fake_twin(model) if fake else model)
    assert shapes(found) == expected
    assert {path: found.dims[path] for path in dims} == dims
    assert found.tried[-1].endswith(": passed")
    leaves = [t for _, t in [*tensors(found.args), *tensors(found.kwargs)]]
    assert all(isinstance(t, FakeTensor) == fake for t in leaves)
    real = materialise(found)
    model(*real.args, **real.kwargs)


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "real"])
def test_a_signal_is_long_enough_for_several_frames(fake: bool) -> None:
    model = Audio()
    found = example_inputs(fake_twin(model) if fake else model)
    real = materialise(found)
    assert model(*real.args).shape[-1] > 1 and found.dims == {"0": (B, None)}


def test_all_dims_of_one_meaning_have_the_size_that_was_asked_for() -> None:
    found = example_inputs(fake_twin(EncoderDecoder()), batch=3, sequence=17)
    assert shapes(found) == {"0": (3, 17), "1": (3, 17)}


def test_integers_stay_below_the_smallest_table() -> None:
    found = example_inputs(fake_twin(Decoder()))
    assert found.bounds == {"0": 37}
    assert int(materialise(found).args[0].max()) < 37


def test_the_dtype_is_the_consumers() -> None:
    assert example_inputs(fake_twin(bf16_mlp())).args[0].dtype is torch.bfloat16


def test_assumptions_say_what_was_given_what_was_not_and_what_was_made_up() -> None:
    text = "\n".join(example_inputs(fake_twin(Decoder())).assumptions)
    assert "tok is int64[2, 13], first used by embedding" in text and "not given: labels" in text
    assert "made up" in "\n".join(example_inputs(fake_twin(Routed())).assumptions)


def test_names_of_classes_and_parameters_do_not_matter() -> None:
    class Qwertz(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.aa, self.bb = nn.Embedding(37, 16), nn.Conv1d(16, 8, 3)

        def forward(self, thing: Tensor) -> Any:
            return self.bb(self.aa(thing).transpose(1, 2))

    assert shapes(example_inputs(fake_twin(Qwertz()))) == {"0": (2, 13)}


def test_trying_leaves_a_real_model_and_the_generator_alone() -> None:
    model = Mlp(nn.Linear(20, 24), nn.BatchNorm1d(24), nn.Dropout()).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    first, second = example_inputs(model), example_inputs(model)
    assert torch.equal(torch.rand(1), drawn)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(first.args[0], second.args[0])


def test_meta_models_get_meta_inputs() -> None:
    with torch.device("meta"):
        model = Mlp()
    assert example_inputs(model).args[0].device.type == "meta"


def test_what_cannot_be_guessed_is_refused_with_what_was_tried() -> None:
    class Picky(nn.Module):
        def forward(self, message: Any) -> Any:
            if not isinstance(message, str):
                raise TypeError("a message is a string")
            return message

    with pytest.raises(InputsNotFound, match=r"forward\(message\)") as caught:
        example_inputs(Picky())
    assert "a message is a string" in (caught.value.got or "") and "example_inputs=" in (caught.value.help or "")


def test_sizes_of_one_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="size of 1"):
        example_inputs(Mlp(), batch=1)


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        ((1, 2), (1, 2), {}),
        ({"x": 1}, (), {"x": 1}),
        (((1,), {"y": 2}), (1,), {"y": 2}),
        (({"x": 1}, {"y": 2}), ({"x": 1}, {"y": 2}), {}),
    ],
)
def test_given_inputs_are_taken_as_they_are(given: Any, args: Any, kwargs: Any) -> None:
    found = example_inputs(Mlp(), given)
    assert (found.args, found.kwargs) == (args, kwargs)


def test_dims_of_given_inputs() -> None:
    ids, mask, bias = torch.ones(3, 7, dtype=torch.long), torch.ones(3, 7), torch.ones(3, 1, 7, 7)
    found = example_inputs(Mlp(), ((ids,), {"mask": mask.bool(), "bias": bias, "states": torch.ones(3, 7, 7)}))
    assert found.dims == {"0": (B, S), "mask": (B, S), "bias": (B, None, S, S), "states": (B, S, S)}
    assert example_inputs(Mlp(), (torch.ones(3, 24),)).dims == {"0": (B, None)}
    assert example_inputs(Mlp(), (torch.ones(3, 3, 8, 8),)).dims == {"0": (B, None, None, None)}
    assert example_inputs(Mlp(), (torch.ones(3, 5, 24),)).dims == {"0": (B, S, None)}


def test_given_nonsense_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="not arguments of a forward"):
        example_inputs(Mlp(), 3)
