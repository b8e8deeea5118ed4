"""Attention drawn at random against its definition: graphs and mechanisms, alone and together.

Shapes, grouped heads, padding on either side and the size of the scores are drawn, too. A module in
float32 may err twice as much as the definition in float32, both against float64.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from attention_checks import assert_agree, spec_of, with_gradients
from torch import nn

from attnspec.backends.factored.definitions import divided, exact_pairs, exact_weights, undivided
from attnspec.lower.lower import Binder
from attnspec.runtime import CompiledAttention

GRAPHS = (
    "full",
    "causal",
    "self",
    "window(radius = 4)",
    "window(radius = 16)",
    "window(before = 64, after = 0)",
    "(window(before = 9, after = 0) | columns(first(2)))",
    "(window(radius = 3) | global(first(1) | last(1)))",
    "block(size = 8)",
    "strided(stride = 5)",
    "columns(every(3))",
    "random(keys = 2, seed = 1)",
    "where(q > 9)",
    "(window(radius = 3) - self)",
    "where(k < q // 2)",
)
MECHANISMS = (
    "linear()",
    "linear(feature = relu)",
    "linear(feature = exp)",
    "taylor()",
    "taylor(order = 2)",
    "favor(features = 8)",
    "favor(features = 8, kind = relu)",
    "rbf(features = 8)",
)
CHANGES = ("", "", "score alibi()", "score bias(buckets = 4)", "score softcap(cap = 5)")
LENGTHS = (1, 2, 3, 5, 16, 17, 33, 59, 64, 65, 70, 100, 130, 200)


@dataclass(frozen=True)
class Case:
    """What is computed, of which shape, with q and k of about which size."""

    body: str
    n_q: int
    n: int
    heads: int
    keys: int
    padding: str
    scale: float
    seed: int

    @staticmethod
    def drawn(seed: int) -> Case:
        draw = random.Random(seed)
        graph = draw.choice((*[draw.choice(GRAPHS)] * 3, "full"))
        mechanism = draw.choice(MECHANISMS)
        what = draw.choice((graph, f"{graph} + {mechanism}", f"{graph} + {mechanism}", mechanism))
        change = draw.choice(CHANGES) if graph in what else ""
        n, keys = draw.choice(LENGTHS), draw.choice((1, 2))
        heads = keys * draw.choice((1, 1, 2, 3))
        causal = draw.choice(("", "causal"))
        return Case(
            body=f"heads {heads} {causal} attend {what} {change}",
            n_q=draw.choice((n, min(n, draw.randint(1, 16)))),
            n=n,
            heads=heads,
            keys=keys,
            padding=draw.choice(("none", "left", "right", "both")),
            # the definition of `rbf` underflows in float32 where q and k are large
            scale=draw.choice((0.3, 1.0, 1.0 if "rbf" in what else 2.0)),
            seed=seed,
        )

    def module(self) -> CompiledAttention:
        """The module, with what it learns drawn."""
        module = spec_of(self.body).compile(head_size=8)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(self.seed))
        return module

    def tensors(self) -> list[torch.Tensor]:
        """q, k and v in float32 for a batch of two."""
        source = torch.Generator().manual_seed(self.seed)
        shapes = ((self.heads, self.n_q, 8), (self.keys, self.n, 8), (self.keys, self.n, 5))
        q, k, v = (torch.randn(2, *shape, generator=source) for shape in shapes)
        return [q * self.scale, k * self.scale, v]

    def real(self) -> torch.Tensor | None:
        """Which keys are real, bool [2, n], other ones in each sample; the first may have none."""
        if self.padding == "none":
            return None
        real = torch.ones(2, self.n, dtype=torch.bool)
        if self.padding != "right":
            real[0, : (self.n + 1) // 2] = False
            real[1, :1] = False
        if self.padding != "left":
            real[1, self.n - self.n // 3 :] = False
        return real


def definition(
    body: str,
    given: Sequence[torch.Tensor],
    real: torch.Tensor | None = None,
    tables: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Every weight written out, in the type of what is given; learned tables [1, heads, …]."""
    q, k, v = given
    batch, heads, n_q, n = *q.shape[:3], k.shape[2]
    if real is None:
        real = torch.ones(batch, n, dtype=torch.bool)
    outs = torch.zeros(batch, heads, n_q, v.shape[3], dtype=q.dtype)
    for work, members in Binder(spec_of(body).program, {}).works(0, heads, n_q, n):
        for head in members:
            at = head * k.shape[1] // heads
            mine = {name: table[0, head] for name, table in (tables or {}).items()}
            for sample in range(batch):
                rows, keys = q[sample, head], k[sample, at]
                if work.mechanism is None:
                    weights = exact_weights(work, head, rows, keys, mine)
                    weights = weights.masked_fill(~exact_pairs(work, n_q, n), 0.0)
                else:
                    weights = undivided(work, head, rows, keys, mine)
                weights = weights.masked_fill(~real[sample], 0.0)
                total = weights.sum(-1, keepdim=True)
                # a query without a key gets 0
                total = torch.where(total == 0, 1.0, total)
                plain = work.mechanism is None
                weights = weights / total if plain else divided(work, weights, total)
                outs[sample, head] = weights @ v[sample, at]
    return outs


def defined(
    case: Case, parameters: Mapping[str, nn.Parameter], kind: torch.dtype
) -> list[torch.Tensor]:
    """Output and gradients of the definition in a type, those of learned tables last."""
    given = [x.to(kind).requires_grad_() for x in case.tensors()]
    tables = {name: x.detach().to(kind).requires_grad_() for name, x in parameters.items()}
    out = definition(case.body, given, case.real(), tables)
    return with_gradients(out, [*given, *tables.values()])


@pytest.mark.parametrize(
    "seed", [*range(32), *(pytest.param(x, marks=pytest.mark.slow) for x in range(32, 200))]
)
def test_what_is_drawn_is_its_definition(seed: int) -> None:
    case = Case.drawn(seed)
    module, given, real = case.module(), case.tensors(), case.real()
    learned = dict(module.named_parameters())
    exact, base = (defined(case, learned, kind) for kind in (torch.float64, torch.float32))
    with torch.no_grad():
        bare = module(*given, key_padding_mask=real)
    given = [x.requires_grad_() for x in given]
    found = with_gradients(module(*given, key_padding_mask=real), [*given, *learned.values()])
    assert_agree(found[:4], exact[:4], base[:4])
    # what is computed where no gradient is asked for, and the gradients of tables
    for mine in (bare, *found[4:]):
        number = 0 if mine is bare else 4
        assert_agree([mine, *found[1:4]], [exact[number], *exact[1:4]], [base[number], *base[1:4]])
