"""Replaced modules compute what torch's own compute: outputs, weights, every gradient, in float64."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoshard import replace
from autoshard.errors import PlanMismatch
from autoshard.plans import Replacement
from autoshard.replace.attention import Attention

WIDTH, HEADS, BATCH, LENGTH, KEYS = 8, 2, 3, 4, 5
LAYOUTS = ["batch first", "length first", "no batch"]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "learned key": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "both keys": {"add_bias_kv": True, "add_zero_attn": True},
    "other widths": {"kdim": 6, "vdim": 10},
    "other widths, no bias, learned key": {"kdim": 6, "vdim": 10, "bias": False, "add_bias_kv": True},
}
SOURCES = ["self", "key is value", "three"]
MASKS = ["", "bool", "float", "bool heads", "float heads", "causal"]
PADDINGS = ["", "bool", "float"]
WEIGHTS = [(False, True), (True, True), (True, False)]


def pair(seed: int = 0, **options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """torch's own module with random values, and its replacement."""
    torch.manual_seed(seed)
    own = nn.MultiheadAttention(WIDTH, HEADS, **options).double()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.copy_(torch.randn_like(parameter))
    made = copy.deepcopy(own)
    replace.apply(made, replace.find(made))
    assert type(made) is Attention
    return own, made


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def calls(layout: str, options: dict[str, Any]) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """Arguments of every kind of call."""

    def shape(length: int, width: int) -> tuple[int, ...]:
        batched = (BATCH, length, width) if layout == "batch first" else (length, BATCH, width)
        return (length, width) if layout == "no batch" else batched

    sources = ["three"] if "kdim" in options else SOURCES
    for source, mask, padding, (weights, average) in itertools.product(sources, MASKS, PADDINGS, WEIGHTS):
        query = rand(*shape(LENGTH, WIDTH))
        keys = LENGTH if source == "self" else KEYS
        key = query if source == "self" else rand(*shape(keys, options.get("kdim", WIDTH)))
        value = key if source != "three" else rand(*shape(keys, options.get("vdim", WIDTH)))
        found: dict[str, Any] = {"need_weights": weights, "average_attn_weights": average}
        if mask:
            rows = (BATCH if layout != "no batch" else 1) * HEADS
            hidden = torch.rand(*((rows,) if "heads" in mask else ()), LENGTH, keys) < 0.4
            if mask == "causal":
                hidden = torch.ones(LENGTH, keys).triu(1).bool()
                found["is_causal"] = True
            hidden[..., 0] = False  # every query sees a key
            found["attn_mask"] = hidden if "float" not in mask else rand(*hidden.shape)
        if padding:
            hidden = torch.rand(*(() if layout == "no batch" else (BATCH,)), keys) < 0.4
            hidden[..., 0] = False
            found["key_padding_mask"] = hidden if padding == "bool" else rand(*hidden.shape)
        yield (query, key, value), found


def run(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Outputs, and the gradients of every argument and parameter."""
    fresh = {id(x): x.clone().requires_grad_() for x in args}
    module.zero_grad()
    answer, weights = module(*(fresh[id(x)] for x in args), **kwargs)
    outputs = [answer] if weights is None else [answer, weights]
    generator = torch.Generator().manual_seed(1)
    torch.stack(
        [(o * torch.randn(o.shape, dtype=o.dtype, generator=generator)).sum() for o in outputs]
    ).sum().backward()
    gradients = [t.grad for t in (*fresh.values(), *module.parameters())]
    return [*outputs, *(g for g in gradients if g is not None)]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert [g.shape for g in got] == [w.shape for w in want]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_is_torch_s_own_in_training(layout: str, name: str) -> None:
    own, made = pair(batch_first=layout == "batch first", **OPTIONS[name])
    for args, kwargs in calls(layout, OPTIONS[name]):
        got, want = run(made, args, kwargs), run(own, args, kwargs)
        assert_equal(got, want)
        assert got[0].stride() == want[0].stride()


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIONS)
def test_attention_is_torch_s_own_in_inference(layout: str, name: str) -> None:
    own, made = pair(batch_first=layout == "batch first", **OPTIONS[name])
    own.eval(), made.eval()
    for args, kwargs in calls(layout, OPTIONS[name]):
        with torch.no_grad():
            got, want = made(*args, **kwargs), own(*args, **kwargs)
        assert_equal([x for x in got if x is not None], [x for x in want if x is not None])
        assert not want[0].is_contiguous() or got[0].is_contiguous()


@pytest.mark.parametrize("weights", [False, True])
def test_dropout_draws_the_same(weights: bool) -> None:
    own, made = pair(dropout=0.5)
    x = rand(LENGTH, BATCH, WIDTH)
    torch.manual_seed(3)
    want = own(x, x, x, need_weights=weights)
    torch.manual_seed(3)
    got = made(x, x, x, need_weights=weights)
    assert_equal([t for t in got if t is not None], [t for t in want if t is not None])
    assert not torch.allclose(made(x, x, x)[0], want[0])
    made.eval(), own.eval()
    assert_equal([made(x, x, x)[0]], [own(x, x, x)[0]])


@pytest.mark.parametrize("weights", [False, True])
def test_a_query_that_sees_no_key_gets_what_torch_gives(weights: bool) -> None:
    own, made = pair()
    x = rand(LENGTH, BATCH, WIDTH)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    padding[1] = True
    got, want = (m(x, x, x, padding, weights)[0] for m in (made, own))
    assert bool(torch.isfinite(want[:, 0]).all())
    assert_equal([got], [want])


SPOILS: dict[str, tuple[str, Any]] = {
    "a scale": ("head_dim", WIDTH),
    "heads counted wrong": ("num_heads", 1),
    "no zero key": ("add_zero_attn", False),
    "another layout": ("batch_first", True),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_spoiled_replacement_is_seen(name: str) -> None:
    own, made = pair(add_zero_attn=True)
    x = rand(LENGTH, LENGTH, WIDTH)
    assert_equal(run(made, (x, x, x), {}), run(own, (x, x, x), {}))
    setattr(made, *SPOILS[name])
    with pytest.raises(AssertionError):
        assert_equal(run(made, (x, x, x), {}), run(own, (x, x, x), {}))


def test_a_small_error_is_seen() -> None:
    own, made = pair()
    with torch.no_grad():
        made.in_proj_weight[0, 0] += 1e-9
    x = rand(LENGTH, BATCH, WIDTH)
    with pytest.raises(AssertionError):
        assert_equal(run(made, (x, x, x), {}), run(own, (x, x, x), {}))


def test_compiled_and_exported() -> None:
    own, made = pair(batch_first=True)
    x = rand(BATCH, LENGTH, WIDTH)
    want = own(x, x, x)
    assert_equal(list(torch.compile(made, backend="aot_eager")(x, x, x)), list(want))
    exported = torch.export.export(made, (x, x, x), strict=False)
    assert_equal(list(exported.module()(x, x, x)), list(want))


def nested(x: Tensor) -> tuple[Tensor, ...]:
    return (torch.nested.nested_tensor([x[:, 0], x[:2, 1]]),) * 3


BAD: dict[str, Callable[[Tensor], tuple[tuple[Tensor, ...], dict[str, Any]]]] = {
    "nested": lambda x: (nested(x), {}),
    "dims": lambda x: ((x, x[0], x[0]), {}),
    "width": lambda x: ((x[..., :4], x, x), {}),
    "length": lambda x: ((x, x, x[1:]), {}),
    "padding": lambda x: ((x, x, x), {"key_padding_mask": torch.zeros(1, LENGTH).bool()}),
    "mask": lambda x: ((x, x, x), {"attn_mask": torch.zeros(LENGTH, 1)}),
    "mask of heads": lambda x: ((x, x, x), {"attn_mask": torch.zeros(HEADS, LENGTH, LENGTH)}),
    "integers": lambda x: ((x, x, x), {"attn_mask": torch.zeros(LENGTH, LENGTH).long()}),
    "a hint without a mask": lambda x: ((x, x, x), {"is_causal": True}),
}


@pytest.mark.parametrize("case", BAD)
def test_refuses_what_torch_refuses(case: str) -> None:
    own, made = pair()
    args, kwargs = BAD[case](rand(LENGTH, BATCH, WIDTH))
    with pytest.raises((AssertionError, RuntimeError)):
        own(*args, **kwargs)
    with pytest.raises(ValueError, match=r"allowed:|nested|hint|differ"):
        made(*args, **kwargs)


def note_call(module: nn.Module, args: Any, answer: Any) -> None:
    module.__dict__["seen"] = module.__dict__.get("seen", 0) + 1


def test_an_instance_stays_itself() -> None:
    module = nn.MultiheadAttention(WIDTH, HEADS).eval()
    module.get_parameter("in_proj_bias").requires_grad_(False)
    module.register_forward_hook(note_call)
    before, keys = {n: id(p) for n, p in module.named_parameters()}, list(module.state_dict())
    replace.apply(module, replace.find(module))
    assert type(module) is Attention
    assert isinstance(module, nn.MultiheadAttention)
    assert {n: id(p) for n, p in module.named_parameters()} == before
    assert list(module.state_dict()) == keys
    assert (module.training, module.in_proj_bias.requires_grad) == (False, False)
    x = torch.ones(2, 3, WIDTH)
    module(x, x, x)
    assert module.__dict__["seen"] == 1
    assert type(pickle.loads(pickle.dumps(copy.deepcopy(module)))) is Attention


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, 16, batch_first=True), 1)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS)
        self.other = nn.Linear(WIDTH, WIDTH)


def test_finds_each_once_and_is_idempotent() -> None:
    model = Model()
    model.again = model.attention
    found = replace.find(model)
    assert {(one.fqn, one.kind) for one in found} == {
        ("encoder", "encoder"),
        ("encoder.layers.0", "layer"),
        ("encoder.layers.0.self_attn", "attention"),
        ("encoder.layers.1", "layer"),
        ("encoder.layers.1.self_attn", "attention"),
        ("decoder", "decoder"),
        ("decoder.layers.0.self_attn", "attention"),
        ("decoder.layers.0.multihead_attn", "attention"),
        ("attention", "attention"),
    }
    assert all(one.why for one in found)
    replace.apply(model, found)
    assert replace.find(model) == ()
    kinds = [type(m) for m in model.modules()]
    replace.apply(model, found)
    assert [type(m) for m in model.modules()] == kinds
    assert type(model.other) is nn.Linear


class Mine(nn.MultiheadAttention):
    """A user's own."""


def test_what_is_not_torch_s_own_is_left_alone() -> None:
    patched, hooked, wrapped = (nn.MultiheadAttention(WIDTH, HEADS) for _ in range(3))
    patched.forward = lambda *args: args  # type: ignore[method-assign]
    hooked.out_proj.register_forward_hook(lambda *_: None)
    wrapped.out_proj = nn.Sequential(nn.Linear(WIDTH, WIDTH))  # type: ignore[assignment]
    for module in (Mine(WIDTH, HEADS), patched, hooked, wrapped, nn.Linear(2, 2)):
        assert replace.find(module) == ()


def test_folded_names_and_misfits() -> None:
    model = Model()
    replace.apply(model, [Replacement("encoder.layers.{0-1}.self_attn", "attention", "")])
    assert type(model.encoder.layers[1].self_attn) is Attention
    for wrong in (
        Replacement("other", "attention", ""),
        Replacement("othr", "attention", ""),
        Replacement("attention", "layer", ""),
    ):
        with pytest.raises(PlanMismatch):
            replace.apply(model, [Replacement("attention", "attention", ""), wrong])
        assert type(model.attention) is nn.MultiheadAttention  # nothing was changed


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": "gelu"}, {"batch_first": False}])
@pytest.mark.parametrize("how", ["training", "inference", "padded", "causal"])
def test_layers_and_stacks_are_torch_s_own(options: dict[str, Any], how: str) -> None:
    torch.manual_seed(0)
    options = {"batch_first": True, "dropout": 0.0, **options}
    own = nn.Transformer(WIDTH, HEADS, 2, 2, 16, **options).double()
    made = copy.deepcopy(own)
    replace.apply(made, replace.find(made))
    length = LENGTH if options["batch_first"] else BATCH
    source, target = rand(BATCH, LENGTH, WIDTH), rand(BATCH, LENGTH, WIDTH)
    kwargs: dict[str, Any] = {}
    if how == "causal":
        causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)
        kwargs = {"src_mask": causal, "tgt_mask": causal}
    if how == "padded":
        padding = torch.zeros(BATCH if options["batch_first"] else LENGTH, length, dtype=torch.bool)
        padding[1, -1] = True
        kwargs = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    if how in ("inference", "padded"):
        own.eval(), made.eval()
        with torch.no_grad():
            assert_equal([made(source, target, **kwargs)], [own(source, target, **kwargs)])
        return
    for module in (own, made):
        module(source, target, **kwargs).square().sum().backward()
    assert_equal([made(source, target, **kwargs)], [own(source, target, **kwargs)])
    for one, other in zip(made.parameters(), own.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert_equal([one.grad], [other.grad])


def test_no_fused_kernel_runs() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True), 1).eval()
    x = torch.randn(BATCH, LENGTH, WIDTH)
    padding = torch.zeros(BATCH, LENGTH, dtype=torch.bool)

    def kernels(**kwargs: Any) -> set[str]:
        with torch.no_grad(), torch.profiler.profile() as profile:
            model(x, **kwargs)
        fused = ("aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention")
        return {event.name for event in profile.events() if event.name in fused or "nested" in event.name}

    assert kernels() and kernels(src_key_padding_mask=padding)
    replace.apply(model, replace.find(model))
    assert not kernels() and not kernels(src_key_padding_mask=padding)


def test_a_stack_with_a_mask_is_exported() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dropout=0.0), 1)
    inputs = (torch.randn(BATCH, LENGTH, WIDTH), nn.Transformer.generate_square_subsequent_mask(LENGTH))
    with pytest.raises(Exception, match="data-dependent"):
        torch.export.export(model, inputs, strict=False)
    want = model(*inputs)
    replace.apply(model, replace.find(model))
    exported = torch.export.export(model, inputs, strict=False)
    torch.testing.assert_close(exported.module()(*inputs), want)
