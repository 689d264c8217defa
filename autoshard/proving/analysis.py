"""The analysis of the model under proof, made only when something asks for it: a right plan needs none."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import nn

from autoshard.errors import AutoshardError
from autoshard.passes.factorise import Factored, Factorise
from autoshard.passes.states import Placed
from autoshard.passes.trace import Trace
from autoshard.pipeline import Options, run


class Analysis:
    """What the passes say of a model.

    Args:
        model: the user's model.
        tp: number of tensor-parallel ranks.
        given: example inputs, or None.
    """

    def __init__(self, model: nn.Module, tp: int, given: Any) -> None:
        self._model = model
        self._tp = tp
        self._given = given

    @cached_property
    def placed(self) -> Placed:
        """What may be cut at this degree.

        Raises:
            AutoshardError: the model cannot be traced.
        """
        options = Options(self._tp, tp=self._tp, example_inputs=self._given, check_heads=False)
        return run(self._model, options)[1].placed

    @cached_property
    def factored(self) -> Factored | None:
        """The factors of every tensor; None where the model cannot be traced."""
        if "placed" in self.__dict__:
            return self.placed.chosen.factored
        try:
            return Factorise().run(Trace(self._given).run(self._model))
        except (AutoshardError, RuntimeError):
            return None  # the second is torch's own, where a size in the graph depends on values
