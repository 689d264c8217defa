"""The inputs a proof runs on: two of different size, real values in float64 on CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.inputs import ExampleInputs, example_inputs, materialise
from autoshard.proving.double import Double
from autoshard.user_code import ERRORS

#: Batch and sequence of the two; no size of a usual model.
_SIZES = ((2, 13), (3, 8))


def make_cases(model: nn.Module, given: Any) -> list[ExampleInputs]:
    """Return two inputs of different batch and length; ``model`` is float64 on CPU.

    Of what was given, the second has one sequence less, where the model runs on that, and else the same values.
    """
    if given is not None:
        first = _floats(example_inputs(model, given))
        second = _smaller(first)
        return [first, second if _runs(model, second) else first]
    with Double():
        found = [example_inputs(model, batch=batch, sequence=sequence) for batch, sequence in _SIZES]
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
