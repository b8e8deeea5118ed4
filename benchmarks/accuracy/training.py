"""One small model, trained the same way with every attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

import attnspec
from attnspec.spec import Spec
from benchmarks.accuracy.tasks import IGNORED, Examples, Task


@dataclass(frozen=True)
class Size:
    """Of a model; its MLPs are twice as wide. Each token is told so many before it. Of the last
    layer so many last places are computed, all of them where that is None."""

    width: int = 32
    heads: int = 2
    layers: int = 2
    told: int = 1
    last: int | None = None


@dataclass(frozen=True)
class Budget:
    """What every system gets: steps of so many examples, the rate at which it learns, reached after
    a share of the steps, and how its weights decay."""

    steps: int = 500
    batch: int = 32
    rate: float = 5e-3
    warm_up: float = 0.1
    decay: float = 1.0


@dataclass(frozen=True)
class Trained:
    """Accuracy on the test examples, and the count of what was learned."""

    accuracy: float
    parameters: int


class Block(nn.Module):
    """Attention and MLP, each behind a norm and around which the input goes."""

    def __init__(self, spec: Spec, size: Size, layer: int, first: Block | None) -> None:
        super().__init__()
        width = size.width
        self.last = size.last if layer == size.layers - 1 else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        shared = None if first is None else first.attention
        self.attention: attnspec.SelfAttention = attnspec.SelfAttention(
            spec, width, size.heads, layer, shared=shared
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        if self.last is None:
            x = x + self.attention(y)
        else:
            x = x[:, -self.last :] + self._of_last(y, self.last)
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out

    def _of_last(self, y: torch.Tensor, count: int) -> torch.Tensor:
        """The attention of the last places, of one that reads queries, keys and values."""
        layer = self.attention
        parts = functional.linear(y, layer.in_weight, layer.in_bias).chunk(3, -1)
        heads = [torch.unflatten(part, 2, (layer.num_heads, -1)) for part in parts]
        q, k, v = (each.transpose(1, 2) for each in heads)
        found = layer.attention(q[:, :, -count:], k, v, layer=layer.layer)
        out: torch.Tensor = layer.out(found.transpose(1, 2).flatten(2))
        return out


class Model(nn.Module):
    """Tokens [b, n] to logits: [b, classes] of a sequence, or [b, n, classes] of its places, of the
    last ones alone where the size says so.

    The class of a sequence is read off its first token, which knows of the others what attention
    has brought it.
    Each token is told the one before it, or some more, by a short convolution: to find out what
    stands together would take more steps than everything else.
    """

    def __init__(self, task: Task, spec: Spec, size: Size = Size()) -> None:
        super().__init__()
        self.whole = task.train.labels.ndim == 1
        if size.last is not None and bool((task.test.labels[:, : -size.last] != IGNORED).any()):
            raise ValueError(f"{task.name} asks before its last {size.last} places")
        width = size.width
        self.tokens = nn.Embedding(task.vocabulary, width)
        self.places = nn.Parameter(torch.randn(task.n, width))
        self.before = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(size.told))
        first = Block(spec, size, 0, None)
        others = (Block(spec, size, at, first) for at in range(1, size.layers))
        self.blocks = nn.Sequential(first, *others)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, task.classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = own = self.tokens(tokens)
        for back, told in enumerate(self.before, 1):
            x = x + functional.pad(told(own), (0, 0, back, -back))
        x = self.blocks(x + self.places)
        found: torch.Tensor = self.head(self.norm(x[:, 0] if self.whole else x))
        return found


def steps(model: nn.Module, task: Task, budget: Budget) -> Iterator[None]:
    """Trains as far as it is asked to: one step of the budget for each `next`."""
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=budget.rate, weight_decay=budget.decay, fused=True
    )
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, budget.rate, budget.steps, pct_start=budget.warm_up
    )
    for _ in range(budget.steps):
        part = task.train.take(torch.randint(len(task.train.tokens), (budget.batch,)))
        found = model(part.tokens)
        wanted = _answers(part, found)
        loss = functional.cross_entropy(
            found.flatten(0, -2), wanted.flatten(), ignore_index=IGNORED
        )
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rates.step()
        yield


def _answers(examples: Examples, logits: torch.Tensor) -> torch.Tensor:
    """The labels of what a model has found: of its last places, if these are all."""
    labels = examples.labels
    return labels if labels.ndim == 1 else labels[:, -logits.shape[1] :]


def train(task: Task, spec: Spec, seed: int, budget: Budget, size: Size = Size()) -> Trained:
    """A model of a size trained from a seed, and what it has learned."""
    torch.manual_seed(seed)
    model = Model(task, spec, size)
    for _ in steps(model, task, budget):
        pass
    count = sum(parameter.numel() for parameter in model.parameters())
    return Trained(accuracy(model, task.test), count)


def accuracy(model: nn.Module, examples: Examples) -> float:
    """The share of labels that a model finds."""
    model.eval()
    right = asked = 0
    with torch.no_grad():
        for part in torch.split(torch.arange(len(examples.tokens)), 256):
            batch = examples.take(part)
            logits = model(batch.tokens)
            wanted = _answers(batch, logits)
            counts = wanted != IGNORED
            right += int(((logits.argmax(-1) == wanted) & counts).sum())
            asked += int(counts.sum())
    model.train()
    return right / max(1, asked)
