"""Feature maps: rows of queries and keys as vectors whose products are the weights of pairs.

A map may give its features in a frame: `values * exp(log)` is what is meant, with a number `log`
for each row, so that exponentials neither overflow nor vanish. The frame of a query cancels in its
quotient; those of keys are brought together where they are summed.

Random features have directions w_1 .. w_m: positive exp(w . x - |x|^2 / 2), hyperbolic the same
with -w as well, trigonometric exp(|x|^2 / 2) (sin, cos)(w . x), relu(w . x); all over the root of
their number. Taylor features are the first terms of the exponential's series: 1 + x . y of unit
rows is the product of (1, x) and (1, y); 1 + s + s^2 / 2 with s = x . y is that of (1, x, x_a x_b
for a < b, x_a^2 / sqrt(2)).
Sources: Choromanski et al. 2021, "Rethinking Attention with Performers", lemma 1 and section 2.3;
Rahimi, Recht 2007, "Random Features for Large-Scale Kernel Machines"; Li, Su et al. 2020, "Linear
Attention Mechanism", section 3; Arora et al. 2024, "Simple linear attention language models balance
the recall-throughput tradeoff", section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from attnspec.backends.common.torch_modes import unseen
from attnspec.backends.factored.definitions import text_of
from attnspec.ir.mechanisms.declaration import KeySums, MechanismDeclaration
from attnspec.ir.mechanisms.taylor import CHANNELS
from attnspec.lower.work import Work, mechanism_of

Tables: TypeAlias = Mapping[str, Tensor]

Features: TypeAlias = "tuple[Tensor, Tensor | None]"
"""Features [..., n, m] of rows, times exp(log), log [..., n], where it is there. A frame is a
constant to autograd: what it takes out of the values it puts back."""


FRAMED = "exp", "trig"
"""Features of the definition in frames of their own; those of others are 0, and left out."""


@dataclass(frozen=True, eq=False)
class FeatureMap:
    """The map of a mechanism, from rows x [B, K, n, d] of K heads to features in their type.

    Rows are multiplied by the root of the scale of scores. Random features go along the directions
    `tables["directions"]` [K, m, d]; those of `rfa` multiply the channels of unit rows by a learned
    `tables["spread"]` [K or 1, d]; those of `rbf` have products that estimate exp(-|x - y|^2 / 2).
    """

    work: Work

    @property
    def declared(self) -> MechanismDeclaration:
        return mechanism_of(self.work)

    @cached_property
    def text(self) -> dict[str, Any]:
        """The functions of the definition, which take directions in the place of a layer."""
        return text_of(self.work, 0, directions=lambda x, rows: rows)

    def __call__(self, x: Tensor, tables: Tables) -> Features:
        name, drawn = self.text["feature_of"].__name__, tables.get("directions")
        if name == "second_order":
            return self._second_order(x * self._factor(x)), None
        if name not in ("positive", "hyperbolic", "gaussian"):
            learned = {f"{self.declared.name}_{part}": each for part, each in tables.items()}
            values, log = self.text["feature_of"](x, drawn, learned)
            return values, log[..., 0] if name in FRAMED else None
        # the same as the definition, which makes more tensors of so many numbers
        factor, count = self._factor(x), self.text["FEATURES"]
        along = x @ (tables["directions"] * factor).mT
        half = x.square().sum(-1, keepdim=True) * (factor**2 / 2)
        if name == "gaussian":
            half = 2 * half
        elif name == "hyperbolic":
            along, count = torch.cat([along, -along], -1), 2 * count
        # the largest of each row goes to its frame, and so does what is the same in a whole row
        top = along.detach().amax(-1, keepdim=True)
        log = top - half.detach()
        less = top if unseen(x) else half + log
        return along.sub_(less).exp_(), log[..., 0] - math.log(count) / 2

    def width(self, size: int) -> int:
        """How many features rows of a size have."""
        return cast(KeySums, self.declared.key_sums(size)).features

    @property
    def paired(self) -> bool:
        """Whether the products of features have a shorter formula, without frames."""
        return bool(self.text["feature_of"].__name__ == "second_order")

    def pairs(self, q: Tensor, k: Tensor) -> Tensor:
        """The products [..., n_q, n_k] of the features of rows [..., n, d] by that formula."""
        scores = (q * self._factor(q)) @ (k * self._factor(k)).mT
        return 1 + scores + scores.square() / 2

    def _second_order(self, x: Tensor) -> Tensor:
        """(the products of two channels, x, 1) of scaled rows.

        The products are computed by blocks of channels: x_a x_b for each pair of blocks, and
        x_a x_b / sqrt(2) for all a and b of one block.
        """
        if not unseen(x):
            products = [
                (one[..., None] * rest[..., None, :]).flatten(-2) for one, rest in _blocks(x)
            ]
            return torch.cat([*products, x, torch.ones_like(x[..., :1])], -1)
        values, low = x.new_empty(*x.shape[:-1], self.width(x.shape[-1])), 0
        for one, rest in _blocks(x):
            shape = one.shape[-1], rest.shape[-1]
            into = torch.unflatten(values[..., low : low + shape[0] * shape[1]], -1, shape)
            torch.mul(one[..., None], rest[..., None, :], out=into)
            low += shape[0] * shape[1]
        values[..., low:-1], values[..., -1] = x, 1.0
        return values

    def _factor(self, x: Tensor) -> float:
        return float(self.text["factor_of"](x.shape[-1]))


def _blocks(x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each block of channels and what it is multiplied with: itself, over the root of 2 on both
    sides of a product, and all channels behind it."""
    for low in range(0, x.shape[-1], CHANNELS):
        one, behind = x[..., low : low + CHANNELS], x[..., low + CHANNELS :]
        yield one, torch.cat([one / math.sqrt(2), behind], -1)
