from __future__ import annotations

import collections
import dataclasses
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from autoshard.errors import PlanMismatch
from autoshard.paths import Argument, split, update

ONE, TWO = torch.ones(2), 2 * torch.ones(2)


def double(value: Tensor) -> Tensor:
    return 2 * value


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = None


def changed(value: Any, path: str) -> Any:
    return update(value, split(path), double, "here")


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (ONE, ""),
        ((ONE, 3), "0"),
        ([ONE, 3], "0"),
        (Pair(ONE, 3), "a"),
        (Pair(ONE, 3), "0"),
        ({"a": ONE, "b": 3}, "a"),
        ({1: (ONE, 3)}, "1.0"),
        (collections.OrderedDict(a=ONE), "a"),
        (Frozen(ONE, 3), "a"),
        (SimpleNamespace(a=ONE), "a"),
        ({"x": [Frozen((0, ONE))]}, "x.0.a.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_changes_one_tensor_and_writes_to_no_container(value: Any, path: str) -> None:
    new = changed(value, path)
    assert type(new) is type(value)
    assert torch.equal(_get(new, path), TWO)
    assert torch.equal(_get(value, path), ONE)


def _get(value: Any, path: str) -> Any:
    found: list[Tensor] = []

    def see(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    update(value, split(path), see, "here")
    return found[0]


@pytest.mark.parametrize(("value", "path"), [(None, "a"), ({"b": ONE}, "a"), ((ONE,), "1"), (Frozen(None), "a")])
def test_leaves_alone_what_was_not_given(value: Any, path: str) -> None:
    assert changed(value, path) is value


@pytest.mark.parametrize(("value", "path"), [((ONE,), ""), (ONE, "0"), ((ONE,), "logits"), (Frozen(3), "a")])
def test_refuses_another_kind_of_value(value: Any, path: str) -> None:
    with pytest.raises(PlanMismatch, match=r"the plan expects .* at here"):
        changed(value, path)


def test_a_model_output_keeps_its_key_and_its_attribute_together() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    output = outputs.CausalLMOutputWithPast(logits=ONE, hidden_states=(ONE, TWO))
    new = changed(changed(output, "logits"), "hidden_states.0")
    assert type(new) is type(output)
    assert torch.equal(new.logits, TWO)
    assert new["logits"] is new.logits
    assert torch.equal(new.hidden_states[0], TWO)
    assert torch.equal(output.logits, ONE)
    assert changed(output, "loss") is output


class Module(nn.Module):
    def forward(self, x: Any, y: Any = None, *rest: Any, flag: Any = None, **extra: Any) -> None: ...


def called(path: str, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    return Argument(Module(), path, "m").update(args, kwargs, double)


def test_finds_an_argument_however_it_is_passed() -> None:
    assert torch.equal(called("x", ONE, 0)[0][0], TWO)
    assert torch.equal(called("x", x=ONE)[1]["x"], TWO)
    assert torch.equal(called("y.1", 0, (0, ONE))[0][1][1], TWO)
    assert torch.equal(called("flag", 0, flag=ONE)[1]["flag"], TWO)
    assert torch.equal(called("other", 0, other=ONE)[1]["other"], TWO)
    assert torch.equal(called("extra.other", 0, other=ONE)[1]["other"], TWO)
    assert torch.equal(called("rest.1", 0, 1, 2, ONE)[0][3], TWO)
    assert called("y", 0) == ((0,), {})
    assert called("rest.0", 0, 1) == ((0, 1), {})


class Opaque(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> None: ...


def test_refuses_to_guess_behind_a_signature_without_names() -> None:
    with pytest.raises(PlanMismatch, match="cannot tell which value is m, argument hidden"):
        Argument(Opaque(), "hidden", "m").update((ONE,), {}, double)
    with pytest.raises(PlanMismatch, match="cannot tell which value"):
        Argument(Opaque(), "args.0", "m").update((), {"hidden": ONE}, double)


def test_refuses_an_argument_that_does_not_exist() -> None:
    with pytest.raises(PlanMismatch, match="the forward of m has no argument 'inputs'") as caught:
        Argument(nn.Linear(2, 2), "inputs", "m")
    assert "did you mean input?" in str(caught.value)
