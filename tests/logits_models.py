"""Models whose logits may stay cut, and some that compute on the whole ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from models import Decoder, hf
from torch import Tensor, nn

VOCAB = 24


class Capped(Decoder):
    """Ops on each logit alone, in the model's own code."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(super().forward(ids).float() / 3.0) * 3.0


class Within(Decoder):
    """The head is a product in the model's own code, with a cap behind it."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return torch.tanh(F.linear(self.norm(x), self.embedding.weight))


class Two(Decoder):
    """Two heads, one result each, in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(32, VOCAB)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return {"logits": self.head(self.norm(x)), "side": self.side(x)}


class Sliced(Decoder):
    """Some of the logits."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids)[..., :20]


class Chosen(Decoder):
    """The logits, and which is the largest."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(ids)
        return logits, logits.argmax(-1)


class Twice(Decoder):
    """The head is called for what is returned, and for a guess inside."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = self.embedding(ids)
        guess = self.head(x).argmax(-1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)), guess


class Smoothed(Decoder):
    """The logits, and a loss that needs them whole."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(ids)
        return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class Headless(Decoder):
    """No logits."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.embedding(ids))  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": Decoder,
    "tied": lambda: Decoder(tied=True),
    "capped": Capped,
    "within": Within,
    "two": Two,
    "llama": lambda: hf("Llama", use_cache=False),
    "gemma2": lambda: hf("Gemma2", use_cache=False),
}


def make(name: str) -> nn.Module:
    """Build a model in float64 with every value random."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
