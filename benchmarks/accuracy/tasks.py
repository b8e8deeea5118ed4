"""The tasks: sequences of tokens with the places at which a class is to be found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.accuracy.cifar import cifar10

IGNORED = -100
"""The label of a place where nothing is asked."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Tokens int64 [m, n], and labels int64 [m] of whole sequences, or [m, n] of places."""

    tokens: torch.Tensor
    labels: torch.Tensor

    def take(self, index: torch.Tensor) -> Examples:
        """The examples with these numbers."""
        return Examples(self.tokens[index], self.labels[index])

    def parted(self, count: int) -> tuple[Examples, Examples]:
        """The first `count` examples, and the others."""
        index = torch.arange(len(self.tokens))
        return self.take(index[:count]), self.take(index[count:])


@dataclass(frozen=True, eq=False)
class Task:
    """Training and test examples; tokens are below `vocabulary`, labels below `classes`."""

    name: str
    vocabulary: int
    classes: int
    train: Examples
    test: Examples

    @property
    def n(self) -> int:
        """Tokens of a sequence."""
        return int(self.train.tokens.shape[1])

    @property
    def chance(self) -> float:
        """The accuracy of always giving the answer that is most often right."""
        asked = self.test.labels[self.test.labels != IGNORED]
        return float(torch.bincount(asked).max() / len(asked))


def digits() -> Task:
    """Handwritten digits pixel by pixel, 8 x 8 with 17 shades: those that come with scikit-learn.

    Source: Alpaydin and Kaynak 1998, the test set of the UCI collection.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    tokens = torch.from_numpy(found.images.reshape(len(found.images), -1).astype(np.int64))
    every = Examples(tokens, torch.from_numpy(found.target.astype(np.int64)))
    order = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).permutation(len(tokens)))
    return Task("sequential digits", 17, 10, *every.take(order).parted(len(order) * 4 // 5))


OPERATORS: Mapping[str, Callable[[list[int]], int]] = {
    "MAX": max,
    "MIN": min,
    "MED": lambda values: int(np.median(values)),
    "SM": lambda values: sum(values) % 10,
}
"""What the lists of ListOps stand for: the median is rounded down, the sum is taken modulo 10."""

_WORDS = (".", *map(str, range(10)), *(f"[{name}" for name in OPERATORS), "]")


def listops(n: int = 24, count: int = 24000, depth: int = 2) -> Task:
    """Nested lists of digits to be computed, brackets kept: `[MAX 2 [MIN 4 7 ] 0 ]`.

    No expression comes twice, so that those of the test are new.
    Source: Nangia and Bowman 2018, "ListOps"; here shorter, with two to four arguments each.
    """
    generator = np.random.Generator(np.random.PCG64(1))
    tokens, labels = np.zeros((count, n), np.int64), np.zeros(count, np.int64)
    made: set[tuple[str, ...]] = set()
    while len(made) < count:
        words, value = _list(generator, depth)
        if len(words) <= n and tuple(words) not in made:
            tokens[len(made), : len(words)] = [_WORDS.index(word) for word in words]
            labels[len(made)] = value
            made.add(tuple(words))
    every = Examples(torch.from_numpy(tokens), torch.from_numpy(labels))
    return Task("ListOps", len(_WORDS), 10, *every.parted(count * 5 // 6))


def _list(generator: np.random.Generator, depth: int) -> tuple[list[str], int]:
    """The words of a list, and its value."""
    name = list(OPERATORS)[generator.integers(len(OPERATORS))]
    parts = [_argument(generator, depth - 1) for _ in range(generator.integers(2, 5))]
    words = [word for part in parts for word in part[0]]
    return [f"[{name}", *words, "]"], OPERATORS[name]([value for _, value in parts])


def _argument(generator: np.random.Generator, depth: int) -> tuple[list[str], int]:
    if depth == 0 or generator.random() < 0.6:
        digit = int(generator.integers(10))
        return [str(digit)], digit
    return _list(generator, depth)


def recall(
    pairs: int = 12,
    asked: int = 8,
    keys: int = 16,
    count: int = 24000,
    copies: int = 1,
    gap: int = 0,
) -> Task:
    """Pairs of a key and a value, then some of the keys again: which value was theirs? Each pair
    stands so many times in a row, and a gap of blanks before the questions.

    Source: Arora et al. 2023, "Zoology" (MQAR); here the questions stand at the end.
    """
    generator = np.random.Generator(np.random.PCG64(2))
    told = 2 * pairs * copies
    n = told + gap + asked
    tokens = np.full((count, n), 2 * keys)
    labels = np.full((count, n), IGNORED)
    for row in range(count):
        chosen = generator.permutation(keys)[:pairs]
        values = generator.integers(0, keys, pairs)
        tokens[row, :told] = np.repeat(np.stack([chosen, keys + values], 1), copies, 0).ravel()
        question = generator.integers(0, pairs, asked)
        tokens[row, n - asked :] = chosen[question]
        labels[row, n - asked :] = values[question]
    every = Examples(torch.from_numpy(tokens), torch.from_numpy(labels))
    return Task("associative recall", 2 * keys + (gap > 0), keys, *every.parted(count * 5 // 6))


def duplication(n: int = 128, symbols: int = 127, count: int = 24000) -> Task:
    """Symbols and the same symbols again, `0 w 0 w`: which one follows, in the second half?

    Source: Kitaev, Kaiser and Levskaya 2020, "Reformer", section 5, with 1,024 tokens.
    """
    generator = np.random.Generator(np.random.PCG64(3))
    half = n // 2
    once = np.zeros((count, half), np.int64)
    once[:, 1:] = generator.integers(1, symbols + 1, (count, half - 1))
    tokens = np.concatenate([once, once], 1)
    labels = np.full((count, n), IGNORED)
    labels[:, half:-1] = tokens[:, half + 1 :]
    every = Examples(torch.from_numpy(tokens), torch.from_numpy(labels))
    return Task("duplication", symbols + 1, symbols + 1, *every.parted(count * 5 // 6))


def images(folder: Path) -> Task:
    """CIFAR-10 in grey, pixel by pixel: 1,024 tokens of 256 shades, from the folder of its Python
    version."""
    parts = [
        Examples(torch.from_numpy(shades), torch.from_numpy(labels))
        for shades, labels in cifar10(folder)
    ]
    return Task("CIFAR-10", 256, 10, parts[0], parts[1])


TASKS: Mapping[str, Callable[[], Task]] = {
    "digits": digits,
    "listops": listops,
    "recall": recall,
}
"""The tasks that need no files."""
