"""Sums over tp in a dtype that was asked for: as exact as it, where the dtype of the values is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import both
from executor_models import Config, Decoder, decoder_plan, loss_of
from simulate import CountCollectives, fake_world, on_rank, per_rank, simulated
from torch import Tensor

from autoshard.executor.collectives import Axis, Conversion
from autoshard.executor.execute import apply, make_mesh
from autoshard.executor.sums import DTYPES
from autoshard.executor.training import Training
from autoshard.executor.whole import full_gradients
from autoshard.plans import Mesh

RANKS = 4
#: four summands of which bfloat16 loses the small ones: the sums are 258 and -258, and rounded one by one 256 and -256
PARTS = tuple(torch.tensor([[a, -a], [-a, a]]).repeat(2, 2).bfloat16() for a in (256.0, 1.0, 1.0, 0.0))


def exact(kind: str) -> Tensor:
    """What a float64 sum rounds to."""
    total = sum((part.double() for part in PARTS), torch.zeros(4, 4, dtype=torch.float64))
    return (total / RANKS if kind.startswith("A") else total).bfloat16()


def sums(kind: str, dtype: torch.dtype | None) -> list[Tensor]:
    """What each rank gets of the sums of a conversion: of its answer where that is one, else of its gradient."""
    with simulated(RANKS):
        axis = Axis(make_mesh(decoder_plan(Decoder(Config()), Mesh(1, 1, RANKS)), "cpu")["tp"], dtype)
        convert = Conversion.parse(kind)
        if kind[0] in "PA":
            answer = convert(per_rank(*PARTS), axis)
        else:
            value = per_rank(*[torch.zeros_like(part) for part in PARTS])
            value = (value[:1] if "S" in kind else value).clone().requires_grad_()
            convert(value, axis).backward(per_rank(*PARTS))
            assert value.grad is not None
            answer = value.grad
        return [on_rank(answer, rank).detach() for rank in range(RANKS)]


@pytest.mark.parametrize("kind", ["P->R", "P->V", "P->S(0)", "P->S(1)", "A->R", "R->V", "S(0)->V"])
def test_a_wide_sum_is_the_exact_one_rounded_once(kind: str) -> None:
    def joined(parts: list[Tensor]) -> Tensor:
        if "S" not in kind:
            assert all(torch.equal(part, parts[0]) for part in parts)
            return parts[0]
        return torch.cat(parts, 1 if "S(1)" in kind else 0)

    narrow, wide = joined(sums(kind, None)), joined(sums(kind, torch.float32))
    assert wide.dtype == narrow.dtype == torch.bfloat16
    assert torch.equal(wide, exact(kind))
    assert not torch.equal(narrow, exact(kind))


def test_integers_keep_their_dtype() -> None:
    big = 2**24 + 1  # no float32
    with simulated(2):
        axis = Axis(make_mesh(decoder_plan(Decoder(Config()), Mesh(1, 1, 2)), "cpu")["tp"], torch.float32)
        value = per_rank(torch.tensor([big, 0]), torch.tensor([0, big]))
        for kind in ("P->R", "P->S(0)"):
            assert on_rank(Conversion.parse(kind)(value, axis), 0).tolist()[0] == big


@pytest.mark.parametrize(("dtype", "close"), [(None, True), (torch.bfloat16, False)])
def test_gradients_of_whole_parameters_are_summed_in_it(dtype: torch.dtype | None, close: bool) -> None:
    ids, whole, model = torch.arange(14).view(2, 7) % 11, Decoder(Config()), Decoder(Config())
    loss_of(whole(ids), ids).backward()
    plan = decoder_plan(model, Mesh(1, 1, 2))
    summed = [name for name, one in plan.parameters.items() if one.grad_sum is not None]
    with simulated(2):
        apply(model, plan, make_mesh(plan, "cpu"), training=Training(tp_reduce_dtype=dtype))
        loss_of(model(ids), ids).backward()
        mine = {name: gradient for name, gradient in full_gradients(model).items() if name in summed}
        got = {name: on_rank(gradient, 0) for name, gradient in mine.items() if gradient is not None}
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters() if name in summed}
    wanted = {name: gradient for name, gradient in gradients.items() if gradient is not None}
    assert got and got.keys() == wanted.keys() and all(got[name].dtype == torch.float64 for name in got)
    apart = max(float((got[name] - wanted[name]).abs().max()) for name in wanted)
    assert (apart < 1e-12) == close


def test_what_is_sent_has_that_dtype() -> None:
    def payloads(dtype: torch.dtype | None) -> set[torch.dtype]:
        seen: set[torch.dtype] = set()

        class Dtypes(CountCollectives):
            def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if function.namespace == "c10d" and "allreduce" in function._schema.name:
                    seen.update(tensor.dtype for tensor in args[0])
                return super().__torch_dispatch__(function, types, args, kwargs)

        with fake_world(2):
            model = Decoder(Config())
            plan = decoder_plan(model, Mesh(1, 1, 2))
            apply(model, plan, make_mesh(plan, "cpu"), training=Training(tp_reduce_dtype=dtype))
            with Dtypes():
                loss_of(model(torch.arange(14).view(2, 7) % 11), torch.arange(14).view(2, 7) % 11).backward()
        return seen

    assert payloads(None) == {torch.float64}
    assert all(payloads(dtype) == {dtype} for dtype in DTYPES)


def test_bytes_of_sums_follow_it_and_those_of_gathers_do_not() -> None:
    options: dict[str, Any] = {"sequence_parallel": True, "dtype": torch.bfloat16}
    _, plain = both("decoder", (1, 1, 2), **options)
    said, wide = both("decoder", (1, 1, 2), **options, tp_reduce_dtype="float32")
    assert said == wide
    assert plain["tp", "all_gather"] == wide["tp", "all_gather"]
    for op in ("all_reduce", "reduce_scatter"):
        count, size = plain["tp", op]
        assert wide["tp", op] == (count, 2 * size)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32])
def test_a_compiled_sum_leaves_what_it_was_given(dtype: torch.dtype | None) -> None:
    with fake_world(2):
        axis = Axis(make_mesh(decoder_plan(Decoder(Config()), Mesh(1, 1, 2)), "cpu")["tp"], dtype)
        conversion, _ = Conversion.parse("P->R"), axis.group  # made before, as a model's first entry does
        convert = torch.compile(lambda value: conversion(value, axis) * 2, backend="aot_eager", fullgraph=True)
        value = torch.ones(2, 2, dtype=torch.bfloat16, requires_grad=True)
        answer = convert(value)
        answer.sum().backward()
    assert answer.dtype == torch.bfloat16 and answer.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()
    assert value.grad is not None and value.tolist() == [[1, 1], [1, 1]] and value.grad.tolist() == [[2, 2], [2, 2]]
