"""The inputs a proof runs on: two of different size, real values in float64 on CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.errors import InvalidArgument
from autoshard.inputs import ExampleInputs, example_inputs, materialise
from autoshard.proving.double import Double
from autoshard.user_code import ERRORS

#: Batch and sequence of the two; no size of a usual model.
_SIZES = ((2, 13), (3, 8))


def make_cases(model: nn.Module, given: Any, multiple: int = 1) -> list[ExampleInputs]:
    """Return two inputs of different batch and length; ``model`` is float64 on CPU.

    Of what was given, the second has one sequence less, where the model runs on that, and else the same values.

    Args:
        model: what runs on them.
        given: example inputs, or None.
        multiple: what divides their lengths; of what was given, the end is left out.

    Raises:
        InvalidArgument: what was given is too short for that, or does not run without its end.
    """
    if given is not None:
        first = _divisible(model, _floats(example_inputs(model, given)), multiple)
        second = _smaller(first)
        return [first, second if _runs(model, second) else first]
    with Double():
        found = [example_inputs(model, batch=batch, sequence=n + -n % multiple) for batch, n in _SIZES]
    return [_floats(materialise(case, batch)) for case, (batch, _) in zip(found, _SIZES, strict=True)]


def _runs(model: nn.Module, case: ExampleInputs) -> bool:
    """Whether the untouched model runs: what looks like a batch may be something else."""
    try:
        with torch.no_grad(), Double():
            model(*case.args, **case.kwargs)
    except ERRORS:
        return False
    return True


def _floats(case: ExampleInputs) -> ExampleInputs:
    """Return the inputs with real float64 values on CPU."""

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            leaf = leaf.detach().cpu()
            return leaf.double() if leaf.is_floating_point() else leaf
        return leaf

    args, kwargs = torch.utils._pytree.tree_map(convert, (case.args, case.kwargs))
    return replace(case, args=args, kwargs=kwargs)


def _divisible(model: nn.Module, case: ExampleInputs, multiple: int) -> ExampleInputs:
    """Return given inputs without their end, where ``multiple`` does not divide their length."""
    lengths: set[int] = set()

    def cut(path: str, value: Any) -> Any:
        dims = case.dims.get(path) or ()
        for dim in (dim for dim, label in enumerate(dims) if isinstance(value, Tensor) and label == "sequence"):
            lengths.add(value.shape[dim])
            value = value.narrow(dim, 0, value.shape[dim] // multiple * multiple)
        return value

    args = tuple(cut(str(index), value) for index, value in enumerate(case.args))
    kwargs = {name: cut(name, value) for name, value in case.kwargs.items()}
    if all(length % multiple == 0 for length in lengths):
        return case
    shorter = replace(case, args=args, kwargs=kwargs)
    if min(lengths) < multiple or not _runs(model, shorter):
        raise InvalidArgument(
            f"the plan cuts the sequence over {multiple} ranks, and the example inputs cannot be cut like that",
            got=f"lengths {sorted(lengths)}; allowed: multiples of {multiple}",
            help="give example_inputs of such a length",
        )
    return shorter


def _smaller(case: ExampleInputs) -> ExampleInputs:
    """Return given inputs with one sequence less, where there are several."""

    def cut(path: str, value: Any) -> Any:
        dims = case.dims.get(path)
        if isinstance(value, Tensor) and dims and "batch" in dims and value.shape[dims.index("batch")] > 1:
            return value.narrow(dims.index("batch"), 0, value.shape[dims.index("batch")] - 1)
        return value

    args = tuple(cut(str(index), value) for index, value in enumerate(case.args))
    kwargs = {name: cut(name, value) for name, value in case.kwargs.items()}
    return replace(case, args=args, kwargs=kwargs)
