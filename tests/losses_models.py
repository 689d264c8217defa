"""Models that compute their own cross-entropy: of logits that may stay cut for it, and of some that may not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from models import Decoder, hf
from torch import Tensor, nn

VOCAB = 24
IGNORED = -100


class Nano(Decoder):
    """Returns logits and, given targets, their loss."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        logits = super().forward(ids)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


class Shifted(Decoder):
    """Predicts the next token, and returns nothing but the loss."""

    def __init__(self, reduction: str = "mean", ignored: int = IGNORED) -> None:
        super().__init__()
        self.reduction, self.ignored = reduction, ignored

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        logits, following = super().forward(ids)[..., :-1, :].contiguous(), targets[..., 1:].reshape(-1)
        return F.cross_entropy(logits.view(-1, VOCAB), following, ignore_index=self.ignored, reduction=self.reduction)


class Criterion(Decoder):
    """The loss is a module of torch's, on logits that are capped."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(**options)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        logits = torch.tanh(super().forward(ids).float() / 3.0) * 3.0
        return self.criterion(logits.flatten(0, 1), targets.flatten())  # type: ignore[no-any-return]


class Within(Decoder):
    """The head is a product in the model's own code; a function computes the loss."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return _loss_of(F.linear(self.norm(x), self.embedding.weight), targets)


def _loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED)


class Transposed(Nano):
    """The classes are not in the last dim."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(Decoder.forward(self, ids).transpose(1, 2), targets)


class Judged(Nano):
    """How many tokens are right, too."""

    def forward(self, ids: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = Decoder.forward(self, ids)
        return _loss_of(logits, targets), (logits.argmax(-1) == targets).sum()


class InSteps(Nano):
    """The loss of log-probabilities."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return F.nll_loss(Decoder.forward(self, ids).log_softmax(-1).flatten(0, 1), targets.flatten())


class Soft(Nano):
    """The targets are probabilities."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        wanted = F.one_hot(targets.clamp(min=0), VOCAB).to(self.embedding.weight.dtype)
        return F.cross_entropy(Decoder.forward(self, ids).flatten(0, 1), wanted.flatten(0, 1))


#: Those whose logits stay cut.
MODELS: dict[str, Callable[[], nn.Module]] = {
    "nano": Nano,
    "mean": Shifted,
    "sum": lambda: Shifted("sum"),
    "none": lambda: Shifted("none", ignored=3),
    "criterion": Criterion,
    "within": Within,
    "llama": lambda: hf("Llama", use_cache=False),
    "gemma2": lambda: hf("Gemma2", use_cache=False),
}

#: Those whose logits are gathered.
GATHERED: dict[str, Callable[[], nn.Module]] = {
    "transposed": Transposed,
    "judged": Judged,
    "in steps": InSteps,
    "soft": Soft,
    "smoothed": lambda: Criterion(label_smoothing=0.1),
    "weighted": lambda: Criterion(weight=torch.linspace(0.5, 1.5, VOCAB)),
}


def make(name: str) -> nn.Module:
    """Build a model in float64 with every value random."""
    torch.manual_seed(0)
    model = (MODELS | GATHERED)[name]().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def batch(model: nn.Module, seed: int = 0, rows: int = 4, length: int = 8) -> Any:
    """Ids and targets, of which some are ignored: more in the first rows, so that data ranks count differently."""
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(1, VOCAB, (2, rows, length), generator=generator)
    if not isinstance(model, (Soft, Judged)):
        targets[0, 2:] = targets[-1, 5] = IGNORED
    if getattr(model, "ignored", IGNORED) != IGNORED:
        targets[targets == IGNORED] = model.ignored
    return {"input_ids": ids, "labels": targets} if hasattr(model, "config") else (ids, targets)


def call(model: nn.Module, given: Any) -> Any:
    """Call a model with what ``batch`` made."""
    return model(**given) if isinstance(given, dict) else model(*given)


def loss_of(answer: Any) -> Tensor:
    """Return the loss in what a model of ``MODELS`` returns, as one number."""
    loss: Tensor = answer.loss if hasattr(answer, "loss") else answer[1] if isinstance(answer, tuple) else answer
    return loss.sum() if loss.dim() else loss
