"""The one place that touches what is private in torch. Checked on torch 2.13.0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed._local_tensor import LocalTensor, local_tensor_mode
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx.experimental import proxy_tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _foreach_supported_types as optim_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as utils_foreach_types
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

__all__ = [
    "DTensorSpec",
    "change_sharded",
    "count_as_foreach",
    "in_backward",
    "is_simulated",
    "lift",
    "local_part",
    "own",
    "plain_functions",
    "reduces_gradients",
    "run",
    "run_many",
    "shard_dim_of",
    "spec_of",
    "when_sharded",
    "wrap",
]


def local_part(tensor: DTensor) -> Tensor:
    """Return this rank's part of ``tensor``, without autograd and without a copy."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return the mesh, placements and global shape of ``tensor`` as one cached object."""
    return tensor._spec


def wrap(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor whose local part is ``local``, without checks: ``from_local`` is ten times slower."""
    return DTensor(local, spec, requires_grad=False)


def shard_dim_of(placement: Placement) -> int | None:
    """Return the dim that a placement cuts, also one that FSDP cuts within what tp left; None for the others."""
    dim: int | None = getattr(placement, "dim", None)
    return dim


def plain_functions() -> AbstractContextManager[None]:
    """Run functions of torch without the ``__torch_function__`` of their arguments."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return guard


def count_as_foreach(kind: type[Tensor]) -> None:
    """Let optimizers and clipping choose foreach kernels for ``kind`` where they would for a plain tensor."""
    for known in (optim_foreach_types, utils_foreach_types):
        if kind not in known:
            known.append(kind)


def when_sharded(model: nn.Module, parameters: Mapping[int, Callable[[DTensor], DTensor]]) -> None:
    """Change each DTensor that FSDP makes of a parameter's shard and of its gradient.

    Args:
        model: FSDP holds its units.
        parameters: the change, by the identity of the sharded parameter.
    """
    for module in model.modules():
        groups = module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []
        for one in (one for group in groups for one in group.fsdp_params):
            if id(one.sharded_param) in parameters:
                _then(one, parameters[id(one.sharded_param)])


def change_sharded(model: nn.Module, change: Callable[[nn.Parameter], None]) -> None:
    """Change each parameter that FSDP holds, in place; what it held before is let go of at once, one by one.

    Args:
        model: FSDP holds its units; their parameters are sharded.
        change: may give a parameter another dtype, and keeps the object.
    """
    for module in model.modules():
        groups = module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []
        for one in (one for group in groups for one in group.fsdp_params):
            change(one.sharded_param)
            one.reset_sharded_param()


def _then(fsdp_parameter: Any, change: Callable[[DTensor], DTensor]) -> None:
    make = fsdp_parameter.to_sharded_dtensor
    fsdp_parameter.to_sharded_dtensor = lambda tensor: change(make(tensor))


def own(gradient: Tensor) -> Tensor:
    """Return ``gradient`` contiguous and held by nobody else: itself where that is so, else a copy.

    autograd steals a gradient it may keep, and judges so by the tensor it sees. Inside a DTensor it sees the
    wrapper, so two parameters of one sum would share memory, and the next accumulation would add to both.
    """
    if not gradient.is_contiguous():
        return gradient.contiguous()
    if type(gradient) is not Tensor or _holders(gradient) != 1:
        return gradient.clone()
    base = gradient._base
    # one reference is the storage object made here; a view and its base hold the storage once each
    expected = 2 if base is None else 3
    holders = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
    if holders != expected or (base is not None and _holders(base) != 2):
        return gradient.clone()
    return gradient


def _holders(tensor: Tensor) -> int:
    return int(tensor._use_count())  # type: ignore[attr-defined]


def run(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    """Apply an autograd function that returns one tensor: ``apply`` has no types."""
    answer: Tensor = function.apply(*inputs)
    return answer


def run_many(function: type[torch.autograd.Function], *inputs: Any) -> tuple[Tensor, ...]:
    """Apply an autograd function that returns several tensors."""
    answer: tuple[Tensor, ...] = function.apply(*inputs)
    return answer


def lift(tensor: Tensor) -> Tensor:
    """Return ``tensor`` with one copy per rank where one process simulates all of them, else itself."""
    mode = local_tensor_mode()
    if mode is None or isinstance(tensor, (LocalTensor, DTensor)):
        return tensor
    return mode.rank_map(lambda rank: tensor.detach().clone())


def is_simulated() -> bool:
    """Whether one process simulates all ranks."""
    return local_tensor_mode() is not None


def in_backward() -> bool:
    """Whether autograd is running a backward on this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def reduces_gradients(module: nn.Module) -> bool | None:
    """Return whether FSDP will reduce this module's gradients in the next backward; None where it holds none."""
    groups = module._get_fsdp_state()._fsdp_param_groups if isinstance(module, FSDPModule) else []
    return bool(groups[0].reduce_grads) if groups else None


class GraphRecorder:
    """Marks the nodes of the graph that make_fx is building, from inside the model's forward.

    Each mark is a number kept in ``node.meta``, which survives the passes that export runs on the graph.
    """

    def __init__(self) -> None:
        self._count = 0
        self._last: fx.Node | None = None

    def mark(self, tensor: Tensor) -> int | None:
        """Return the mark of the node that made ``tensor``, or None where no graph is being built."""
        mode = proxy_tensor.get_proxy_mode()
        if mode is None:
            return None
        slot: Any = proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
        if slot is None:
            return None
        marks: list[int] = slot.proxy.node.meta.setdefault("autoshard_marks", [])
        self._count += 1
        marks.append(self._count)
        return self._count

    def stamp(self, call: int) -> None:
        """Say that every node made since the last stamp belongs to module call ``call`` (-1: to none)."""
        mode = proxy_tensor.get_proxy_mode()
        if mode is None:
            return
        root: Any = mode.tracer.graph._root
        node = root.prev
        last = node
        while node is not root and node is not self._last:
            node.meta["autoshard_call"] = call
            node = node.prev
        self._last = last

    @staticmethod
    def place(tensor: Tensor, site: str) -> None:
        """Note which instruction made ``tensor``, where a graph is being built and no inner call has noted one."""
        mode = proxy_tensor.get_proxy_mode()
        slot: Any = None if mode is None else proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
        if slot is not None:
            slot.proxy.node.meta.setdefault("autoshard_site", site)

    @staticmethod
    def site_of(node: fx.Node) -> str:
        """Return the instruction that made a node, empty where none was noted."""
        site: str = node.meta.get("autoshard_site", "")
        return site

    @staticmethod
    def marks_of(node: fx.Node) -> list[int]:
        """Return the marks that a node carries."""
        marks: list[int] = node.meta.get("autoshard_marks", [])
        return marks

    @staticmethod
    def call_of(node: fx.Node) -> int:
        """Return the module call that a node belongs to, -1 for none."""
        call: int = node.meta.get("autoshard_call", -1)
        return call


def num_parameter_hooks(parameter: Tensor) -> int:
    """Return how many hooks run on the gradient of a leaf: tensor hooks and post-accumulate-grad hooks."""
    tables: tuple[Any, Any] = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
    return sum(len(table or ()) for table in tables)


def num_backward_hooks(module: nn.Module) -> int:
    """Return how many hooks of ``register_full_backward_hook`` see the gradients of a module's inputs."""
    return len(module._backward_hooks)


def num_tensor_hooks(parameter: Tensor) -> int:
    """Return how many hooks of ``register_hook`` wait for the gradient of a leaf."""
    return len(parameter._backward_hooks or ())


def register_first(parameter: Tensor, hook: Callable[[Tensor], None]) -> None:
    """Register a post-accumulate-grad hook that runs before those that are there already."""
    handle = parameter.register_post_accumulate_grad_hook(hook)
    hooks: Any = parameter._post_accumulate_grad_hooks
    # autograd walks the plain dict below: move_to_end of the ordered one would not reach it
    others = {key: other for key, other in hooks.items() if key != handle.id}
    hooks.clear()
    hooks[handle.id] = hook
    hooks.update(others)


class UnscalingHook(torch.amp.GradScaler):
    """A gradient scaler with a place to look at what it found, before any rank decides to skip its step."""

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        self._after_unscaling(optimizer, found.values())
        return found

    def _after_unscaling(self, optimizer: Optimizer, found: Iterable[Tensor]) -> None:
        """Change in place the 0-dim tensors, one per device, that are 1 where a gradient overflowed, else 0."""


# the operators behind F.linear, matmul, convolutions and F.scaled_dot_product_attention
SAVED_OPERATORS = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
)

FakeMode = FakeTensorMode | None
# what a fake tensor raises where a result depends on values that it does not have
NO_VALUES = (DataDependentOutputException, DynamicOutputShapeException)


def fake_mode_of(values: Iterable[Tensor]) -> FakeMode:
    """Return the mode of the first fake tensor among ``values``, or None where all are real."""
    return detect_fake_mode(tuple(values))


def quiet_fake_tensors() -> AbstractContextManager[None]:
    """Keep fake tensors from logging each operator that refuses its operands, where that is expected."""
    return _quiet("torch._subclasses.fake_tensor")


def quiet_redistribution() -> AbstractContextManager[None]:
    """Keep DTensor from advising on the speed of redistributions, where tensors have a few elements."""
    return _quiet("torch.distributed.tensor._redistribute")


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    log = logging.getLogger(logger)
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before
