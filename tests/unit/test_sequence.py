"""Where the sequence is cut between regions: what the pass finds, gives up and leaves alone; what spoils a plan."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any

import pytest
import torch
from models import Decoder, hf
from sequence_models import CUT, LEFT, Language, ids_of, make
from simulate import fake_world, on_rank, per_rank, same_on_all, seeded, simulated
from torch import Tensor, nn

from autoshard.api import plan as make_plan
from autoshard.errors import InvalidArgument
from autoshard.executor.collectives import Axis, Conversion
from autoshard.executor.execute import apply, make_mesh
from autoshard.plans import Mesh, Plan
from autoshard.proving.verification import verify


@functools.cache
def planned(name: str) -> Plan:
    return make_plan(make(name), world=2, tp=2, sequence_parallel=True)


def at(plan: Plan, *sides: str) -> dict[str, str]:
    """The conversions of a cut sequence, by module and path."""
    return {
        f"{fqn}.{key}": kind
        for fqn, module in plan.module_plans()
        for key, kind in module.sequence.items()
        if key.partition(":")[0] in sides
    }


# ---- what is found


def test_a_sum_becomes_a_part_of_it_and_an_entry_gathers() -> None:
    plan = planned("decoder")
    block = {"attention.inputs:x": "S(-2)->V", "attention.o.outputs:": "P->S(-2)"}
    block |= {"mlp.inputs:x": "S(-2)->V", "mlp.down.outputs:": "P->S(-2)"}
    wanted = {f"blocks.{i}.{key}": kind for i in range(2) for key, kind in block.items()}
    wanted |= {"embedding.outputs:": "P->S(-2)", "head.inputs:input": "S(-2)->V"}
    assert at(plan, "inputs", "outputs") == wanted
    assert plan.sequence == {"ids": 1}
    assert not plan.warnings


def test_what_works_on_a_part_has_a_partial_gradient() -> None:
    plan = planned("decoder")
    summed = {fqn for fqn, tensor in plan.parameters.items() if tensor.grad_sum is not None}
    assert summed == {f"blocks.{i}.norm{k}.weight" for i in range(2) for k in (1, 2)} | {"norm.weight"}
    assert plan.parameters["norm.weight"].why.startswith("it works on each rank's part of the sequence")
    assert {module.style for fqn, module in plan.module_plans() if "norm" in fqn} == {"sequence"}


def test_parameters_of_a_block_itself_and_frozen_ones() -> None:
    plan = planned("parameters of blocks")
    assert plan.parameters["blocks.0.gain"].grad_sum is not None
    assert plan.parameters["blocks.0.shift"].grad_sum is None


def test_runs_without_gradients_are_those_of_a_plan_without_it() -> None:
    plan, plain = planned("pre-norm"), make_plan(make("pre-norm"), world=2, tp=2, sequence_parallel=False)
    for fqn, module in plain.module_plans():
        cut = dict(plan.module_plans())[fqn]
        assert (cut.inputs, cut.outputs, cut.returns) == (module.inputs, module.outputs, module.returns)
    assert not plain.sequence
    assert not at(plain, "inputs", "outputs", "returns", "takes")


@pytest.mark.parametrize("name", CUT)
def test_as_many_sums_as_there_are(name: str) -> None:
    kinds = list(at(planned(name), "outputs").values())
    assert sum(kind.startswith("P->S") for kind in kinds) == CUT[name][1]


def test_sums_of_tokens_are_reduced_as_one_where_they_have_their_sequence_again() -> None:
    plan = planned("tokens of experts")
    mlp = dict(plan.module_plans())["blocks.0.mlp"]
    assert (mlp.inputs, mlp.outputs) == ({"x": "R->V"}, {"": "P->R"})
    assert mlp.sequence == {"inputs:x": "S(-2)->V", "outputs:": "P->S(-2)", "returns:": "S(-2)->R"}
    inner = {fqn: module.outputs for fqn, module in plan.module_plans() if fqn.startswith("blocks.0.mlp.")}
    assert [fqn for fqn, outputs in inner.items() if "P->R" in outputs.values()] == []


def test_a_stream_with_the_sequence_first() -> None:
    assert set(at(planned("sequence first"), "inputs").values()) == {"S(-3)->V"}


def test_what_modules_return_and_are_given_can_be_made_whole() -> None:
    plan = planned("pre-norm")
    more = {f"blocks.{i}.second.takes:input": "S(-2)->R" for i in range(2)}  # what the block's own code adds up
    assert at(plan, "takes") == {"blocks.0.takes:x": "S(-2)->R", **more}
    assert at(plan, "returns")["blocks.0.returns:"] == "S(-2)->R"


def test_a_model_that_measures_its_stream_first_is_cut_behind_that() -> None:
    plan = make_plan(hf("Llama"), world=2, tp=2, sequence_parallel=True)
    kinds = at(plan, "inputs", "outputs")
    assert kinds["model.layers.0.inputs:hidden_states"] == "R->S(-2)"
    assert "model.embed_tokens.outputs:" not in kinds
    assert kinds["model.layers.0.self_attn.inputs:hidden_states"] == "S(-2)->V"
    (warning,) = plan.warnings
    assert warning.startswith("a part of the sequence's way between regions is left whole: the code reads a size")


def test_many_blocks_are_one_pattern() -> None:
    plan = make_plan(Language(layers=6), world=2, tp=2, sequence_parallel=True)
    assert "blocks.{0-5}.mlp.down" in plan.modules
    assert len(at(plan, "outputs")) == 2 * 6 + 2


# ---- what is not


@pytest.mark.parametrize("name", ["a length as a number", "residual inside"])
def test_code_that_reads_a_size_of_the_stream_keeps_it_whole(name: str) -> None:
    plan = planned(name)
    assert not plan.sequence
    assert not at(plan, "inputs", "outputs", "returns", "takes")
    assert all(tensor.grad_sum is None for tensor in plan.parameters.values())
    (warning,) = plan.warnings
    assert warning.startswith("the sequence stays whole between regions: the code reads a size of the sequence (")


def test_a_model_without_a_sequence() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    plan = make_plan(model, world=2, tp=2, sequence_parallel=True, example_inputs=(torch.zeros(3, 16),))
    assert not plan.sequence
    assert "the sequence stays whole between regions" in plan.warnings[-1]


def test_one_rank_and_no_wish() -> None:
    assert not make_plan(make("pre-norm"), world=2, tp=1, sequence_parallel=True).sequence
    assert not make_plan(make("pre-norm"), world=2, tp=2, sequence_parallel=False).sequence


# ---- the plan


def test_a_plan_keeps_it_and_says_it() -> None:
    plan = planned("pre-norm")
    assert Plan.from_dict(plan.to_dict()) == plan
    text = str(plan)
    assert "S(-2)->V (sequence)" in text
    assert "in training, when the sequence is" in text
    assert plan.to_json() == make_plan(make("pre-norm"), world=2, tp=2, sequence_parallel=True).to_json()


# ---- proofs


@pytest.mark.parametrize("name", [*CUT, *LEFT])
def test_every_plan_is_exact_in_both_modes(name: str) -> None:
    proof = verify(make(name), planned(name))
    assert proof.ok, str(proof)
    modes = {path.endswith("without gradients") for path in proof.outputs}
    assert modes == ({True, False} if planned(name).sequence else {False})


def test_four_ranks_and_given_inputs() -> None:
    model, ids = make("pre-norm"), (ids_of(2, 11),)
    plan = make_plan(model, world=4, tp=4, sequence_parallel=True, example_inputs=ids)
    assert verify(model, plan, example_inputs=ids).ok
    with pytest.raises(InvalidArgument, match="the example inputs cannot be cut like that"):
        verify(model, plan, example_inputs=(ids_of(2, 3),))


def spoiled(plan: Plan, how: str) -> Plan:
    """Take one fact out of a plan."""
    data = plan.to_dict()
    modules, parameters = data["modules"], data["parameters"]
    if how == "grad_sum":
        parameters["blocks.0.second.weight"]["grad_sum"] = None
    elif how == "twice":
        parameters["norm.weight"]["grad_sum"] = None
        parameters["norm.bias"]["grad_sum"] = None
    elif how == "entry":
        modules["blocks.{0-1}.mlp"]["sequence"]["inputs:x"] = "S(-2)->R"
    elif how == "exit":
        modules["blocks.{0-1}.mlp.down"]["sequence"]["outputs:"] = "P->R"
    elif how == "no entry":
        del modules["head"]["sequence"]["inputs:input"]
    elif how == "dim":
        modules["blocks.{0-1}.mlp.down"]["sequence"]["outputs:"] = "P->S(-3)"
    return Plan.from_dict(data)


@pytest.mark.parametrize("how", ["grad_sum", "twice", "entry"])
def test_a_spoiled_plan_has_wrong_gradients_only(how: str) -> None:
    proof = verify(make("pre-norm"), spoiled(planned("pre-norm"), how))
    assert not proof.ok
    assert max(proof.outputs.values()) < 1e-9
    assert max(proof.parameters.values()) > 1e-3


@pytest.mark.parametrize("how", ["exit", "no entry", "dim"])
def test_a_spoiled_plan_fails(how: str) -> None:
    assert not verify(make("pre-norm"), spoiled(planned("pre-norm"), how)).ok


# ---- the executor


@pytest.mark.parametrize(("dim", "shape"), [(-2, (2, 4, 3)), (0, (4, 3)), (2, (1, 3, 6))])
def test_conversions_and_their_gradients(dim: int, shape: tuple[int, ...]) -> None:
    parts = [seeded(*shape, seed=rank) for rank in range(2)]
    weights = [seeded(*shape, seed=rank + 5) for rank in range(2)]
    whole = parts[0] + parts[1]
    with simulated(2):
        axis = Axis(make_mesh(dataclasses.replace(planned("decoder"), mesh=Mesh(1, 1, 2)), "cpu")["tp"])
        x = per_rank(*parts).requires_grad_()
        cut = Conversion.parse(f"P->S({dim})")(x, axis)
        for rank in range(2):
            torch.testing.assert_close(on_rank(cut, rank), whole.chunk(2, dim)[rank])
        joined = Conversion.parse(f"S({dim})->V")(cut, axis)
        torch.testing.assert_close(same_on_all(joined), whole)
        (joined * per_rank(*weights)).sum().backward()
        torch.testing.assert_close(same_on_all(x.grad), weights[0] + weights[1])


def test_a_length_that_does_not_divide_is_refused_where_a_value_is_cut() -> None:
    with fake_world(2):
        axis = Axis(make_mesh(planned("decoder"), "cpu")["tp"])
        with pytest.raises(InvalidArgument, match=r"cannot cut dim 1 of a tensor \(2, 5\) over 2"):
            Conversion.parse("P->S(1)")(torch.zeros(2, 5), axis)


def applied(model: nn.Module, plan: Plan) -> Any:
    return apply(model, plan, make_mesh(plan, "cpu"))


def test_a_part_that_would_leave_the_model_is_refused() -> None:
    with fake_world(2):
        model = applied(make("pre-norm"), planned("pre-norm"))
        assert [value.shape for value in model(ids_of(2, 8), collect=True)[1:]] == [(2, 8, 16)] * 3
        seen: list[Tensor] = []
        model.table.register_forward_hook(lambda module, args, output: seen.append(output))
        model.register_forward_hook(lambda module, args, output: (output, seen.pop() * 2), prepend=True)
        with pytest.raises(InvalidArgument, match=r"returns a rank's part of the sequence: 1\n.*\n.*\(2, 4, 16"):
            model(ids_of(2, 8))


def test_an_exception_leaves_nothing_behind() -> None:
    with fake_world(2):
        model = applied(make("pre-norm"), planned("pre-norm"))
        for _ in range(2):
            with pytest.raises(IndexError):
                model(torch.full((2, 8), 10**6))
            with pytest.raises(InvalidArgument, match="a sequence of 7"):
                model(ids_of(2, 7))
            with pytest.raises(InvalidArgument, match="outside of a forward of the model"):
                model.blocks[0](torch.zeros(2, 8, 16, dtype=torch.float64))
        assert model(ids_of(2, 8)).shape == (2, 8, 24)


def test_gradients_inside_of_a_forward_without_are_refused() -> None:
    class Inner(Language):
        def forward(self, ids: Tensor, collect: bool = False) -> Any:
            with torch.enable_grad():
                return super().forward(ids)

    with fake_world(2):
        model = applied(Inner(), make_plan(Inner(), world=2, tp=2, sequence_parallel=True))
        assert model(ids_of(2, 8)).shape == (2, 8, 24)
        with torch.no_grad(), pytest.raises(InvalidArgument, match="gradients are wanted outside of a forward"):
            model(ids_of(2, 8))


def test_copies_decide_for_themselves() -> None:
    with fake_world(2):
        model = applied(make("pre-norm"), planned("pre-norm"))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert other(ids_of(2, 8)).shape == (2, 8, 24)
            with pytest.raises(InvalidArgument, match="a sequence of 7"):
                other(ids_of(2, 7))


@pytest.mark.parametrize("key", ["input:x", "inputs", "blocks"])
def test_a_plan_that_names_no_side_is_refused(key: str) -> None:
    data = planned("pre-norm").to_dict()
    data["modules"]["head"]["sequence"] = {key: "S(-2)->V"}
    with fake_world(2), pytest.raises(InvalidArgument, match="nothing is converted at"):
        applied(make("pre-norm"), Plan.from_dict(data))


def test_the_decoder_of_the_tests_is_cut_at_every_length() -> None:
    model = Decoder().double()
    odd = (torch.zeros(2, 7, dtype=torch.long),)
    plan = make_plan(model, world=2, tp=2, sequence_parallel=True, example_inputs=odd)
    assert plan.sequence == {"ids": 1}  # an odd length to trace with says nothing of the lengths to run with
    assert verify(model, plan).ok
