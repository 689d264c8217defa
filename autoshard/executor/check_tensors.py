"""What can be refused of one tensor's plan, before the model is changed."""

from __future__ import annotations

from torch import Tensor
from torch.nn.parameter import is_lazy

from autoshard._torch import num_parameter_hooks
from autoshard.errors import InvalidArgument, PlanMismatch
from autoshard.plans import Parts, Plan, TensorPlan


def check_tensor(name: str, tensor: Tensor, tensor_plan: TensorPlan, plan: Plan) -> None:
    """Refuse one tensor that is not what the plan says, or a plan for it that cannot be followed."""
    if is_lazy(tensor):
        raise PlanMismatch("a parameter has no shape yet", at=name, help="run the model once before planning")
    got = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if got != (tensor_plan.shape, tensor_plan.dtype):
        raise PlanMismatch(
            f"{name} is not what the plan was made for",
            got=f"{got[0]} {got[1]}; planned: {tensor_plan.shape} {tensor_plan.dtype}",
            help="make the plan from this model",
        )
    if tensor.requires_grad and not tensor_plan.trainable:
        raise PlanMismatch(f"{name} takes a gradient and was frozen when it was planned", at=name)
    if num_parameter_hooks(tensor):
        raise InvalidArgument(
            f"{name} has {num_parameter_hooks(tensor)} gradient hooks, which would be lost",
            at=name,
            help="register them after the plan is applied",
        )
    _check_cut(name, tensor_plan, plan.mesh.tp)
    _check_parts(name, tensor_plan, plan.mesh.tp)
    _check_not_yet(name, tensor_plan, plan.mesh.tp)
    _check_slices(name, tensor_plan, plan.mesh.tp)
    _check_fsdp_dim(name, tensor_plan, plan)


def _check_cut(name: str, tensor_plan: TensorPlan, tp: int) -> None:
    dim = tensor_plan.tp_dim
    if dim is None:
        return
    if not 0 <= dim < len(tensor_plan.shape) or tensor_plan.shape[dim] % tp:
        raise InvalidArgument(
            f"dim {dim} of {tensor_plan.shape} cannot be cut evenly over {tp} tensor-parallel ranks", at=name
        )
    if tensor_plan.grad_sum is not None or tensor_plan.read != "local":
        raise InvalidArgument("a parameter that is cut has its own gradient and value on each rank", at=name)


def _check_parts(name: str, tensor_plan: TensorPlan, tp: int) -> None:
    parts, dim = tensor_plan.tp_parts, tensor_plan.tp_dim
    if parts is None:
        return
    if dim is None or not _make_up(parts, tensor_plan.shape[dim]) or any(length % tp for _, length in parts):
        raise InvalidArgument(
            f"the parts do not make up dim {dim} of {tensor_plan.shape} in pieces that {tp} divides",
            at=name,
            got=str(parts),
        )


def _check_not_yet(name: str, tensor_plan: TensorPlan, tp: int) -> None:
    copies = 1 if tensor_plan.tp_dim is not None else tp
    grad_sum = tensor_plan.grad_sum
    if tensor_plan.tp_copies != copies:
        raise InvalidArgument(
            f"{tensor_plan.tp_copies} copies of a piece over {tp} ranks are not supported yet",
            at=name,
            got=f"{tensor_plan.tp_copies}; allowed: {copies}",
        )
    if grad_sum is not None and (grad_sum.parts is not None or grad_sum.ranks != tp):
        raise InvalidArgument(
            "summing part of a gradient, or over part of the ranks, is not supported yet", at=name, got=str(grad_sum)
        )
    if tensor_plan.read not in ("local", "first_rank", "slice"):
        raise InvalidArgument(f"no way to read a parameter is called {tensor_plan.read!r}", at=name)
    if tensor_plan.read == "first_rank" and grad_sum is not None:
        raise InvalidArgument(
            "a parameter that is read on the first rank has its whole gradient on every rank", at=name
        )


def _make_up(pieces: Parts, size: int) -> bool:
    """Whether ``(offset, length)`` pieces lie end to end and make up a dim."""
    ends = [0, *(offset + length for offset, length in pieces)]
    return [offset for offset, _ in pieces] == ends[:-1] and ends[-1] == size and all(n > 0 for _, n in pieces)


def _check_slices(name: str, tensor_plan: TensorPlan, tp: int) -> None:
    slices, dim, shape = tensor_plan.slices, tensor_plan.slice_dim, tensor_plan.shape
    if tensor_plan.read != "slice":
        if slices is not None or dim is not None:
            raise InvalidArgument(
                "slices are given of a parameter that is not read in slices", at=name, got=f"read={tensor_plan.read!r}"
            )
        return
    if slices is None or dim is None or tensor_plan.tp_dim is not None:
        raise InvalidArgument(
            "a parameter that is read in slices is held whole, and names slices and their dim",
            at=name,
            got=f"slices={slices}, slice_dim={dim}, tp_dim={tensor_plan.tp_dim}",
        )
    if not 0 <= dim < len(shape) or not _make_up(tuple((o, n) for o, n, _ in slices), shape[dim]):
        raise InvalidArgument(f"the slices do not make up dim {dim} of {shape}", at=name, got=str(slices))
    for offset, length, ways in slices:
        if ways < 1 or length % ways or tp % ways:
            raise InvalidArgument(
                f"a slice of {length} elements at {offset} cannot be shared in {ways} equal ways by {tp} ranks",
                at=name,
                got=f"{ways} ways; allowed: {', '.join(str(n) for n in _ways(length, tp))}",
            )
    if tensor_plan.trainable and tensor_plan.grad_sum is None:
        raise InvalidArgument(
            "a parameter that is read in slices has a part of its gradient on each rank",
            at=name,
            got="no grad_sum",
            help=f"set grad_sum over all {tp} ranks",
        )


def _ways(length: int, tp: int) -> list[int]:
    return [ways for ways in range(1, tp + 1) if length % ways == 0 and tp % ways == 0]


def _check_fsdp_dim(name: str, tensor_plan: TensorPlan, plan: Plan) -> None:
    dim = tensor_plan.fsdp_dim
    if not dim:
        return
    size = tensor_plan.shape[dim] // (plan.mesh.tp if dim == tensor_plan.tp_dim else 1)
    if size % plan.mesh.dp_shard:
        raise InvalidArgument(
            f"fsdp cannot cut dim {dim} of {tensor_plan.shape} over {plan.mesh.dp_shard} ranks evenly", at=name
        )
