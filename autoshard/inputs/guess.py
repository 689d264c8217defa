"""Guesses: what an argument of a forward might be, before anyone has looked at what the forward does with it.

A guess is a dtype and a tuple of dims that remember what they stand for, so that a later demand ("80 channels") can
change one of them and leave the rest.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

BATCH, SEQUENCE = "batch", "sequence"
# sizes of dims that nobody has asked for yet: primes, so that such a dim is recognised in any tensor made from it
PLACEHOLDERS = (11, 7, 5, 17, 19, 23)
SIDE = 96

_IDS = re.compile(r"(^|_)(ids?|idx|index|indices|tokens?|input_tokens|labels?|targets?)$")
_MASK = re.compile(r"mask$")
_IMAGE = re.compile(r"(^|_)(pixels?|images?|imgs?|pictures?)(_|$)")
_TIME = re.compile(r"^(t|time|timesteps?|sigmas?|noise_level)$")
_COUNT = re.compile(r"(^|_)(len|length|seqlen|seq_len|num|n)(_|$)")


@dataclass(frozen=True)
class Dim:
    """One dim of a guessed tensor.

    Attributes:
        kind: ``batch``, ``sequence``, ``width`` (features), ``channel``, ``side`` (of an image) or ``length``.
        size: elements.
        fixed: whether the forward asked for this size.
    """

    kind: str
    size: int
    fixed: bool = False

    @property
    def role(self) -> str | None:
        """``batch``, ``sequence`` or None: what the size means for the workload."""
        return self.kind if self.kind in (BATCH, SEQUENCE) else None


@dataclass(frozen=True)
class Guess:
    """What is handed over for one argument.

    Attributes:
        kind: ``float``, ``ids`` (integers), ``ones`` (a mask) or ``value`` (no tensor).
        dims: the tensor's dims, outermost first.
        dtype: the tensor's dtype.
        bound: integers are below it.
        value: the argument itself where ``kind`` is ``value``; else a tensor that the model brought, or None.
    """

    kind: str
    dims: tuple[Dim, ...] = ()
    dtype: torch.dtype = torch.float32
    bound: int = 2
    value: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements per dim."""
        return tuple(dim.size for dim in self.dims)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())

    def __str__(self) -> str:
        if self.kind == "value":
            return repr(self.value)
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"

    def with_dim(self, index: int, dim: Dim) -> Guess:
        """Return this guess with one dim replaced."""
        return dataclasses.replace(self, dims=(*self.dims[:index], dim, *self.dims[index + 1 :]))


@dataclass(frozen=True)
class Facts:
    """What is known before the first try.

    Attributes:
        parameters: the forward's named parameters, in order.
        open_positional: whether the forward takes ``*args``.
        batch: size of a batch dim.
        sequence: size of a sequence dim.
        dtype: of the model's first floating-point parameter.
        device: of the model's first parameter.
        channels: image channels, from the config where it has them.
        sides: image height and width, or None where the config does not say.
        vocab: number of token ids, from the config where it has it.
        widths: the commonest sizes of the parameters' dims.
    """

    parameters: tuple[inspect.Parameter, ...]
    open_positional: bool
    batch: int
    sequence: int
    dtype: torch.dtype
    device: torch.device
    channels: int = 3
    sides: tuple[int, int] | None = None
    vocab: int = 128
    widths: tuple[int, ...] = ()

    def placeholder(self, index: int) -> int:
        """Return the ``index``-th size that stands for "unknown": never the batch or the sequence."""
        free = [size for size in PLACEHOLDERS if size not in (self.batch, self.sequence)]
        return free[index % len(free)]

    def dims(self, kind: str, rank: int) -> tuple[Dim, ...]:
        """Return the usual dims of a tensor of ``rank`` dims: an image has four, ids have two, features three."""
        batch, sequence = Dim(BATCH, self.batch), Dim(SEQUENCE, self.sequence)
        if kind == "ones":
            return {0: (), 1: (batch,), 2: (batch, sequence), 3: (batch, sequence, sequence)}.get(
                rank, (batch, *[Dim("width", 1)] * (rank - 3), sequence, sequence)
            )
        if kind == "ids" and rank <= 2:
            return (batch, sequence)[:rank]
        if rank <= 3:
            return (batch, sequence, self.width(0))[:rank] if rank != 2 else (batch, self.width(0))
        high, wide = self.sides or (SIDE, SIDE)
        outer = tuple(self.width(1 + index) for index in range(rank - 4))
        return (batch, *outer, Dim("channel", self.channels), Dim("side", high), Dim("side", wide))

    def width(self, index: int) -> Dim:
        """Return a feature dim of unknown size."""
        return Dim("width", self.placeholder(index))

    def floats(self, rank: int) -> Guess:
        """Guess a floating-point tensor."""
        return Guess("float", self.dims("float", rank), self.dtype)

    def ids(self, rank: int, bound: int | None = None) -> Guess:
        """Guess integers below ``bound``."""
        return Guess("ids", self.dims("ids", rank), torch.int64, bound or self.vocab)

    def ones(self, rank: int, dtype: torch.dtype = torch.int64) -> Guess:
        """Guess a mask that masks nothing."""
        return Guess("ones", self.dims("ones", rank), dtype)

    def first_guess(self, parameter: inspect.Parameter) -> Guess:
        """Guess from an argument's name and annotation: the public face of the forward."""
        value = _annotated_value(parameter, self)
        if value is not None:
            return value
        name = parameter.name.lower()
        if _MASK.search(name):
            return self.ones(2)
        if _IDS.search(name):
            return self.ids(2)
        if _IMAGE.search(name):
            return self.floats(4)
        return self.floats(1 if _TIME.search(name) else 3)

    def alternatives(self) -> list[Guess]:
        """Return one guess of every usual form, the likeliest first."""
        return [
            self.floats(3),
            self.ids(2),
            self.floats(4),
            self.floats(2),
            self.ids(1),
            self.floats(1),
            self.floats(5),
            self.ones(2, torch.bool),
            self.ones(4, torch.bool),
            Guess("value", value=1),
            Guess("value", value=1.0),
            Guess("value", value=False),
        ]


def _annotated_value(parameter: inspect.Parameter, facts: Facts) -> Guess | None:
    """Return a plain number where the annotation says so."""
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = text.replace("Optional[", "").rstrip("]").split("|")[0].strip()
    if text == "int":
        return Guess("value", value=facts.sequence if _COUNT.search(parameter.name) else 1)
    return {"float": Guess("value", value=1.0), "bool": Guess("value", value=False)}.get(text)


def read_facts(model: torch.nn.Module, batch: int, sequence: int) -> Facts:
    """Read the forward's signature, the first parameter and, where there is a config, its sizes."""
    parameters, open_positional = _signature(model)
    held = [*model.parameters(), *model.buffers()]
    sizes = Counter(size for parameter in model.parameters() for size in parameter.shape)
    floating = next((tensor.dtype for tensor in held if tensor.dtype.is_floating_point), torch.get_default_dtype())
    return Facts(
        parameters=parameters,
        open_positional=open_positional,
        batch=batch,
        sequence=sequence,
        dtype=floating,
        device=held[0].device if held else torch.device("cpu"),
        channels=_config_int(model, ("num_channels", "in_channels", "in_chans")) or 3,
        sides=_config_sides(model),
        vocab=_config_int(model, ("vocab_size",)) or 128,
        widths=tuple(size for size, _ in sizes.most_common(3) if size > 1),
    )


def _signature(model: torch.nn.Module) -> tuple[tuple[inspect.Parameter, ...], bool]:
    """Return the forward's named parameters; a wrapper that only takes ``*args`` shows its only child's."""
    every = list(inspect.signature(model.forward).parameters.values())
    named = tuple(p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    children = list(model.children())
    if not named and len(children) == 1:
        return _signature(children[0])
    if not named and every and every[0].kind is inspect.Parameter.VAR_POSITIONAL:
        named = (inspect.Parameter("input", inspect.Parameter.POSITIONAL_ONLY),)
    return named, any(p.kind is p.VAR_POSITIONAL for p in every)


def _configs(model: torch.nn.Module) -> list[Any]:
    """Return the model's config and the configs inside it; empty where there is none."""
    config = getattr(model, "config", None)
    if config is None:
        return []
    inner = list(config.values()) if isinstance(config, Mapping) else list(getattr(config, "__dict__", {}).values())
    return [config, *[item for item in inner if hasattr(item, "__dict__")]]


def _config_values(model: torch.nn.Module, names: tuple[str, ...]) -> list[Any]:
    found = []
    for config in _configs(model):
        for name in names:
            value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
            if value is not None:
                found.append(value)
    return found


def _config_int(model: torch.nn.Module, names: tuple[str, ...]) -> int | None:
    values = _config_values(model, names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _config_sides(model: torch.nn.Module) -> tuple[int, int] | None:
    for value in _config_values(model, ("image_size", "img_size")):
        sizes = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(sizes, int):
            return sizes, sizes
        if isinstance(sizes, (list, tuple)) and len(sizes) == 2 and all(isinstance(size, int) for size in sizes):
            return sizes[0], sizes[1]
    return None
