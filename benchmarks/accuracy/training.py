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
    """Of a model; its MLPs are twice as wide."""

    width: int = 32
    heads: int = 2
    layers: int = 2


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
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        shared = None if first is None else first.attention
        self.attention: attnspec.SelfAttention = attnspec.SelfAttention(
            spec, width, size.heads, layer, shared=shared
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        out: torch.Tensor = x + self.mlp(self.norms[1](x))
        return out


class Model(nn.Module):
    """Tokens [b, n] to logits: [b, classes] of a sequence, or [b, n, classes] of its places.

    The class of a sequence is read off its first token, which knows of the others what attention
    has brought it.
    Each token is told the one before it, the shortest of convolutions: to find out what stands
    together would take more steps than everything else.
    """

    def __init__(self, task: Task, spec: Spec, size: Size = Size()) -> None:
        super().__init__()
        self.whole = task.train.labels.ndim == 1
        self.tokens = nn.Embedding(task.vocabulary, size.width)
        self.places = nn.Parameter(torch.randn(task.n, size.width))
        self.before = nn.Linear(size.width, size.width, bias=False)
        first = Block(spec, size, 0, None)
        others = (Block(spec, size, at, first) for at in range(1, size.layers))
        self.blocks = nn.Sequential(first, *others)
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, task.classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = x + functional.pad(self.before(x), (0, 0, 1, -1))
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
        loss = functional.cross_entropy(
            model(part.tokens).flatten(0, -2), part.labels.flatten(), ignore_index=IGNORED
        )
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        rates.step()
        yield


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
            found = model(batch.tokens).argmax(-1)
            counts = batch.labels != IGNORED
            right += int(((found == batch.labels) & counts).sum())
            asked += int(counts.sum())
    model.train()
    return right / max(1, asked)
