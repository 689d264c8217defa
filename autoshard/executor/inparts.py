"""A DTensor whose tp cut is in parts: canonical wherever it is seen whole, the local tensor wherever it is computed on.

To torch it is cut ``Shard(dim)`` over tp, in the order by rank (see ``parts``): whatever works element by element is
right, at no cost. Gathering, saving and loading go through the methods below and are canonical. What mixes positions,
such as a product or a view, would be silently wrong and raises. A placement of our own was tried instead: the
operators of torch 2.13 rebuild a plain ``Shard`` or gather, and no optimizer step survives that.

A DTensor without this class is canonical, so that one from a checkpoint or ``distribute_tensor`` is put in order when
it is copied or assigned to a parameter, or found as state of one when its optimizer steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.serialization import add_safe_globals

from autoshard._torch import count_as_foreach, local_part, plain_functions, spec_of, wrap
from autoshard.errors import InvalidArgument
from autoshard.executor.parts import Order, held
from autoshard.executor.positions import ELEMENTWISE, FORBIDDEN, ORDERLESS, is_unknown_kernel, name_of

ORDER = "_autoshard_order"


class InParts(DTensor):
    """See the module. Made by ``mark``."""

    @property
    def order(self) -> Order:
        """How its cut dim is cut."""
        order: Order = self.__dict__[ORDER]
        return order

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the whole tensor, canonical; every rank calls this."""
        with plain_functions():
            whole = DTensor.redistribute(self, placements=[Replicate()] * spec_of(self).mesh.ndim)
            return self.order.canonical(whole.to_local(grad_placements=grad_placements))

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """Return it whole on every rank, or as it is.

        Raises:
            InvalidArgument: other placements are asked for.
        """
        spec = spec_of(self)
        wanted = spec.placements if placements is None else tuple(placements)
        if wanted == spec.placements:
            return self
        if not all(placement.is_replicate() for placement in wanted):
            raise _refusal(f"redistribution from {spec.placements} to {wanted}")
        return DTensor.from_local(self.full_tensor(), spec.mesh, wanted, run_check=False)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Refuse: the local tensor has not the rows that the placements say.

        ``from_local`` with these placements, a loader that fills a rank's rows by their numbers, or a kernel that mixes
        rows would be wrong without an error.

        Raises:
            InvalidArgument: always.
        """
        raise _refusal("to_local")

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """Return what a distributed checkpoint saves of this rank."""
        properties = TensorProperties.create_from_tensor(local_part(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets, index),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for index, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return where each piece of this rank lies in the canonical tensor."""
        spec, dim = spec_of(self), self.order.dim
        within = held(spec)
        chunks = []
        for piece in self.order.pieces(spec):
            box = [*within[:dim], (piece.canonical, piece.length), *within[dim + 1 :]]
            if all(length for _, length in box):
                chunks.append(ChunkStorageMetadata(torch.Size(o for o, _ in box), torch.Size(n for _, n in box)))
        return chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """Return the piece that begins at ``index.offset``, a view of this rank's memory."""
        assert index.offset is not None
        dim = self.order.dim
        for piece in self.order.pieces(spec_of(self)):
            if piece.canonical == index.offset[dim]:
                return local_part(self).narrow(dim, piece.local, piece.length)
        raise InvalidArgument("a rank holds no such piece of a parameter cut in parts", got=str(index))

    def __deepcopy__(self, memo: dict[int, Any]) -> InParts:
        if id(self) in memo:
            known: InParts = memo[id(self)]
            return known
        local = copy.deepcopy(local_part(self), memo)
        with plain_functions():
            made: Any = wrap(local, spec_of(self))
            is_parameter = isinstance(self, nn.Parameter)
            made = nn.Parameter(made, self.requires_grad) if is_parameter else made.requires_grad_(self.requires_grad)
            gradient = self.grad
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        memo[id(self)] = made
        if gradient is not None:
            made.grad = copy.deepcopy(gradient, memo)
        return mark(made, self.order)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with plain_functions():
            requires_grad, is_parameter = self.requires_grad, isinstance(self, nn.Parameter)
        return _rebuild, (local_part(self), spec_of(self), self.__dict__, requires_grad, is_parameter)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function of torch: one that works element by element keeps the order, what mixes positions raises."""
        kwargs = kwargs or {}
        name = name_of(function)
        if name == "copy" and isinstance(args[0], InParts) and is_canonical(args[1]):
            args = (args[0], put_in_order(args[1], args[0]), *args[2:])
        if name in FORBIDDEN or is_unknown_kernel(function):
            raise _refusal(name)
        known = name in ELEMENTWISE or name in ORDERLESS
        likes = [_agreed(name, group) for group in _positions((*args, *kwargs.values()))] if known else []
        with plain_functions():
            answer = function(*args, **kwargs)
        answers = _tensors(answer)
        if name in ELEMENTWISE:
            for one, like in zip(answers, likes, strict=False):
                if like is not None and isinstance(one, DTensor):
                    _follow(name, one, like)
        elif any(one.dim() or name not in ORDERLESS for one in answers):
            raise _refusal(name)
        return answer


def mark(tensor: DTensor, order: Order) -> InParts:
    """Make ``tensor``, which holds its rows by rank, an ``InParts``, in place."""
    tensor.__class__ = InParts
    tensor.__dict__[ORDER] = order
    assert isinstance(tensor, InParts)
    return tensor


def is_canonical(tensor: object) -> bool:
    """Whether ``tensor`` is a DTensor in canonical order."""
    return isinstance(tensor, DTensor) and not isinstance(tensor, InParts)


def put_in_order(canonical: DTensor, like: InParts) -> InParts:
    """Return a DTensor of any placements in the order, and with the placements, of ``like``; every rank calls this."""
    whole: Tensor = canonical.full_tensor()
    return cut_in_parts(whole.detach(), like)


def cut_in_parts(whole: Tensor, like: InParts) -> InParts:
    """Return this rank's share of a canonical whole tensor that every rank has, in the order of ``like``."""
    spec = spec_of(like)
    by_rank = like.order.by_rank(whole).contiguous()
    return mark(distribute_tensor(by_rank, spec.mesh, spec.placements, src_data_rank=None), like.order)


def _rebuild(local: Tensor, spec: Any, attributes: dict[str, Any], requires_grad: bool, is_parameter: bool) -> InParts:
    made: Any = wrap(local, spec)
    made = nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)
    made.__dict__.update(attributes)
    return mark(made, attributes[ORDER])


def _refusal(what: str) -> InvalidArgument:
    return InvalidArgument(
        f"{what} on a tensor that is cut in parts: its rows are in another order than the whole one's",
        help="take tensor.full_tensor() first, which is in order; element by element, use the tensor itself",
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [one for one in value if isinstance(one, Tensor)] if isinstance(value, (list, tuple)) else []


def _positions(arguments: Sequence[Any]) -> Iterator[list[Tensor]]:
    """Yield the tensors that meet: all operands, or those at one place of the lists that a foreach kernel takes."""
    lists = [one for one in arguments if isinstance(one, (list, tuple)) and _tensors(one)]
    if not lists:
        yield [one for one in arguments if isinstance(one, Tensor)]
        return
    length = max(map(len, lists))
    for place in range(length):
        yield [one[place] for one in lists if len(one) == length and isinstance(one[place], Tensor)]


def _agreed(name: str, tensors: Sequence[Tensor]) -> InParts | None:
    """Return one that is cut in parts, or None; the others must be cut alike, or hold one number."""
    first = next((one for one in tensors if isinstance(one, InParts)), None)
    if first is None:
        return None
    for one in tensors:
        if isinstance(one, InParts):
            if one.order != first.order or spec_of(one).placements != spec_of(first).placements:
                raise _refusal(f"{name} of two tensors that are cut differently,")
        elif isinstance(one, DTensor) and one.numel() != 1:
            raise _refusal(f"{name} with a tensor that is not,")
    return first


def _follow(name: str, answer: DTensor, like: InParts) -> None:
    """Say that an answer holds its rows in the order of ``like``."""
    if isinstance(answer, InParts):
        return
    mine, theirs = spec_of(answer), spec_of(like)
    if mine.shape != theirs.shape or mine.placements != theirs.placements:
        raise _refusal(name)
    mark(answer, like.order)


def _order_state(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Put state in order that was loaded as canonical tensors; before each step of any optimizer."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if isinstance(parameter, InParts):
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if is_canonical(value) and value.shape == parameter.shape:
                        state[key] = put_in_order(value, parameter)


register_optimizer_step_pre_hook(_order_state)
count_as_foreach(InParts)
add_safe_globals([_rebuild, Order])  # as torch does for DTensor: saved state loads with weights_only=True
