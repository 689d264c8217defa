"""Logits that stay cut over tp inside the model: a DTensor whose cross-entropy each rank works out on its share.

To the model's code they are whole: their sizes are those of the whole, and whatever is done with them is right. Ops on
each logit alone and views that leave the last dim apart keep them cut. ``F.cross_entropy`` sends a few numbers for each
row (``cross_entropy``), also where a function or a module of torch's calls it. Everything else finds them whole: they
are gathered for it, which the plan does not count, as the trace had no such code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from autoshard._torch import plain_functions, spec_of
from autoshard.errors import InvalidArgument
from autoshard.executor.cross_entropy import REDUCTIONS, cross_entropy
from autoshard.executor.positions import name_of
from autoshard.outputs import tensors
from autoshard.paths import split, update

if TYPE_CHECKING:
    from autoshard.executor.collectives import Axis

_SHARE = "_autoshard_share"
_INPLACE = re.compile(r"^__i(add|sub|mul|div|truediv|floordiv|mod|pow|matmul|and|or|xor|lshift|rshift)__$")
#: What works on each element alone, by the name that ``name_of`` gives.
_ELEMENTWISE = frozenset(
    """
    abs add bfloat16 clone contiguous detach div divide double exp float gelu half mul multiply neg negative relu
    requires_grad sigmoid silu sub subtract tanh to true_divide truediv
    """.split()
)
#: What lays out anew; whether the last dim is still apart is seen by the answer.
_VIEWS = frozenset("view reshape flatten unflatten unsqueeze squeeze narrow select".split())
#: What reads no element.
_READS_NONE = frozenset(
    """
    size dim ndimension numel nelement stride element_size is_floating_point is_complex is_contiguous get_device
    register_hook retain_grad __len__ __hash__ __repr__ __str__ __format__ is_tensor
    """.split()
)


@dataclass(frozen=True)
class Share:
    """What belongs to cut logits beside their values.

    Attributes:
        axis: the tp axis.
        whole: makes a rank's share whole.
        returned: whether the model returns them as they are cut.
    """

    axis: Axis
    whole: Callable[[Tensor, Axis], Tensor]
    returned: bool


class CutLogits(DTensor):
    """See the module. Made by ``keep_cut``."""

    @property
    def share(self) -> Share:
        """What belongs to them."""
        share: Share = self.__dict__[_SHARE]
        return share

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch: on the share, or where that will not do on whole logits.

        Raises:
            InvalidArgument: it would write into them what the share alone does not tell.
        """
        kwargs = dict(kwargs or {})
        if function is F.cross_entropy:
            loss = _loss(*args, **kwargs)
            if loss is not None:
                return loss
        logits = [one for one in tree_leaves((args, kwargs)) if isinstance(one, CutLogits)]
        if not _is_local(function, args, kwargs):
            _refuse_write(function, args, kwargs)
            args, kwargs = tree_map_only(CutLogits, made_whole, (args, kwargs))
            return function(*args, **kwargs)
        with plain_functions():
            answer = function(*args, **kwargs)
        return _follow(answer, logits[0]) if isinstance(answer, DTensor) else answer


def keep_cut(cut: DTensor, share: Share) -> CutLogits:
    """Make ``cut``, a DTensor of the tp mesh cut along its last dim, logits that stay cut, in place.

    Raises:
        InvalidArgument: it is cut along another dim.
    """
    if not _is_cut_last(cut):
        raise InvalidArgument("only logits that are cut along their last dim can stay cut", got=str(cut.placements))
    cut.__class__ = CutLogits
    cut.__dict__[_SHARE] = share
    assert isinstance(cut, CutLogits)
    return cut


def made_whole(logits: CutLogits) -> Tensor:
    """Return the whole logits, a plain tensor that takes a gradient as they do."""
    return logits.share.whole(_local(logits), logits.share.axis)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def hand_out(module: nn.Module, args: Any, answer: Any) -> Any:
    """Return the answer with logits as the plan says that the model returns them; a forward hook of the model."""
    for path, tensor in list(tensors(answer)):
        if isinstance(tensor, CutLogits):
            change = _plain if tensor.share.returned else made_whole
            answer = update(answer, split(path), change, f"the model, answer {path}")  # type: ignore[arg-type]
    return answer


def _plain(logits: CutLogits) -> Tensor:
    """Return them as a DTensor of torch's own: the same object, as FSDP warns of views that a model returns."""
    del logits.__dict__[_SHARE]
    plain: Any = logits
    plain.__class__ = DTensor
    return logits


def _local(logits: CutLogits) -> Tensor:
    with plain_functions():
        return logits.to_local()


def _loss(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return the loss on the ranks' shares, as ``F.cross_entropy`` is called; None where it needs the logits whole."""
    shape = spec_of(input).shape if isinstance(input, CutLogits) else ()
    plain = isinstance(target, Tensor) and not isinstance(target, DTensor) and not target.is_floating_point()
    usual = weight is None and size_average is None and reduce is None and label_smoothing == 0.0
    if not plain or not usual or reduction not in REDUCTIONS or len(shape) not in (1, 2) or target.shape != shape[:-1]:
        return None
    return cross_entropy(_local(input), target, input.share.axis, ignore_index, reduction)


def _is_local(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function works on a rank's share as it does on the whole."""
    name = name_of(function)
    if getattr(function, "__name__", "") in ("__get__", "__set__", "__delete__") or name in _READS_NONE:
        return True
    if sum(isinstance(one, Tensor) for one in tree_leaves((args, kwargs))) != 1 or "out" in kwargs:
        return False
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return all(one is None or one is Ellipsis or isinstance(one, (int, slice)) for one in index)
    return name in _ELEMENTWISE or name in _VIEWS


def _refuse_write(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    name = getattr(function, "__name__", "")
    own = name.endswith("_") and not name.endswith("__")
    written = own or name == "__setitem__" or bool(_INPLACE.match(name)) or bool(kwargs.get("inplace"))
    into = args[:1] if written else (kwargs.get("out"),)
    if any(isinstance(one, CutLogits) for one in tree_leaves(into)):
        raise InvalidArgument(
            f"{name} would write into logits that are cut over tp",
            help="write into a copy, or plan with example_inputs on which the model does so",
        )


def _follow(answer: DTensor, like: CutLogits) -> Tensor:
    """Return what a function made of cut logits: cut logits again, or whole where the last dim is not apart."""
    if isinstance(answer, CutLogits):
        return answer
    if _is_cut_last(answer):
        return keep_cut(answer, like.share)
    whole: Tensor = answer.full_tensor()
    return whole


def _is_cut_last(tensor: DTensor) -> bool:
    spec = spec_of(tensor)
    return tuple(spec.placements) == (Shard(len(spec.shape) - 1),)
