"""Which of torch's optimizers work on sharded parameters: a table, measured on torch 2.13.0.

``benchmarks/optimizers.py`` measures it again and writes it to ``docs/optimizers.md``; a test holds it against the
installed torch. What is not in it, subclasses included, is tried out instead: see ``optim_trial``.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from torch import optim

WORKS = "works"
REFUSED = "refused"
NO_OPTION = ""

#: The ways torch computes a step, each with the arguments that ask for it.
WAYS = MappingProxyType({"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}})


@dataclass(frozen=True)
class Support:
    """One optimizer class.

    Attributes:
        kind: the class.
        loop: verdict on one parameter after the other: ``WORKS`` or ``REFUSED``.
        foreach: verdict on the foreach kernels, ``NO_OPTION`` where the class has none.
        fused: verdict on the fused kernel, ``NO_OPTION`` where the class has none.
        in_parts: verdict on matrices that tp cuts in parts, such as fused projections.
        instead: what to use where it is refused.
        note: what to know where it works.
    """

    kind: type[optim.Optimizer]
    loop: str = WORKS
    foreach: str = WORKS
    fused: str = NO_OPTION
    in_parts: str = WORKS
    instead: str = ""
    note: str = ""

    def verdict(self, way: str) -> str:
        """Return the verdict on one of ``WAYS``."""
        verdicts = {"loop": self.loop, "foreach": self.foreach, "fused": self.fused}
        return verdicts[way]

    def options(self, way: str) -> dict[str, bool]:
        """Return the arguments that ask for a way; a class without the choice takes none."""
        return dict(WAYS[way]) if way != "loop" or self.foreach != NO_OPTION else {}


_LEAVE_OUT = "foreach=True, or leave both out"

TABLE: tuple[Support, ...] = (
    Support(optim.ASGD),
    Support(optim.Adadelta),
    Support(optim.Adafactor, REFUSED, REFUSED, instead="torch.optim.AdamW: its state is cut with the parameters"),
    Support(
        optim.Adagrad,
        fused=REFUSED,
        instead=_LEAVE_OUT,
        note="has state from the start: of a model on meta, make it once there are weights",
    ),
    Support(optim.Adam, fused=WORKS),
    Support(optim.AdamW, fused=WORKS),
    Support(optim.Adamax),
    Support(
        optim.LBFGS,
        foreach=NO_OPTION,
        in_parts=REFUSED,
        note="before its first step; history whole on every rank; the closure gives the mean loss of all ranks; "
        "not on matrices cut in parts",
    ),
    Support(
        optim.Muon,
        foreach=NO_OPTION,
        in_parts=REFUSED,
        note="matrices only, and none cut in parts; every step gathers each matrix, and computes in bfloat16: close, "
        "not equal",
    ),
    Support(optim.NAdam),
    Support(optim.RAdam),
    Support(optim.RMSprop),
    Support(optim.Rprop, REFUSED, REFUSED, instead="torch.optim.RMSprop or torch.optim.AdamW"),
    Support(optim.SGD, fused=REFUSED, instead=_LEAVE_OUT),
    Support(
        optim.SparseAdam,
        REFUSED,
        NO_OPTION,
        instead="torch.optim.Adam, and a table with sparse=False: sharded gradients are dense",
    ),
)


def support_of(kind: type[optim.Optimizer]) -> Support | None:
    """Return the row of a class of ``torch.optim``; None for any other class, subclasses of those too."""
    return next((support for support in TABLE if support.kind is kind), None)


def way_of(foreach: object, fused: object, on_accelerator: bool) -> str:
    """Return the way that a group's flags choose, as torch does where both are left out.

    Args:
        foreach: the group's ``foreach``, or None.
        fused: the group's ``fused``, or None.
        on_accelerator: whether the parameters are on one: there foreach is torch's default.
    """
    if fused:
        return "fused"
    if foreach is None:
        return "foreach" if on_accelerator else "loop"
    return "foreach" if foreach else "loop"
