"""Whether another kernel could beat torch's flash kernel on the CPU: tiles by it, by the library's
matrix products with a softmax between them, chunk by chunk in the cache, and by these products
alone, which no kernel that is made of them can undercut."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from attnspec.backends.common.flash import flash
from attnspec.bench.timing import alternate
from benchmarks.cases import SIZE, Settings, Tiles
from benchmarks.measuring import Json, geometric_mean

IN_CACHE = 1 << 20
"""Bytes of scores that are held at a time, about: half of what a core keeps close."""

OPERATIONS = 4
"""Operations of a pair for each number of a head: a product and a sum for its score, and for what
it adds to the output."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Products:
    """Attention of tiles q [b, r, d], k and v [b, c, d] by products into buffers that are kept."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.q, self.k, self.v = q, k.transpose(1, 2), v
        self.out, self.lse = torch.empty_like(q), q.new_empty((*q.shape[:2], 1))
        rows, columns = q.shape[1], k.shape[1]
        self.together = max(1, IN_CACHE // (4 * rows * columns))
        self.scores = q.new_empty(min(self.together, len(q)), rows, columns)

    def __call__(self, softmax: bool = True) -> torch.Tensor:
        """The output like q, and the log-sum-exps in `lse`; without a softmax, products alone."""
        scale = 1 / math.sqrt(self.q.shape[2])
        for low in range(0, len(self.q), self.together):
            some = slice(low, low + self.together)
            q, out, lse = self.q[some], self.out[some], self.lse[some]
            scores = self.scores[: len(q)]
            torch.baddbmm(scores, q, self.k[some], beta=0, alpha=scale, out=scores)
            if softmax:
                most = scores.amax(2, keepdim=True)
                scores.sub_(most).exp_()
                torch.sum(scores, 2, keepdim=True, out=lse)
            torch.bmm(scores, self.v[some], out=out)
            if softmax:
                out.div_(lse)
                lse.log_().add_(most)
        return self.out


def drawn(tiles: Tiles) -> Tensors:
    """The numbers of q, k and v of so many tiles."""
    made = torch.Generator().manual_seed(0)
    sizes = tiles.queries, tiles.keys, tiles.keys
    q, k, v = (torch.randn(tiles.count, size, SIZE, generator=made) for size in sizes)
    return q, k, v


def subjects_of(tiles: Tiles) -> dict[str, Callable[[], torch.Tensor]]:
    """What computes the tiles; the last one no attention."""
    q, k, v = drawn(tiles)
    products = Products(q, k, v)
    return {
        "flash": lambda: flash(*(x[:, None] for x in (q, k, v)), 0.0, False)[0][:, 0],
        "products": products,
        "floor": lambda: products(softmax=False),
    }


def measure(settings: Settings) -> dict[str, Json]:
    """Rates of every shape of tiles, in operations a second, and how much quicker than the flash
    kernel the others are."""
    rows: list[Json] = []
    gains: dict[str, list[float]] = {"products": [], "floor": []}
    for tiles in settings.fused:
        subjects = subjects_of(tiles)
        error = float((subjects["flash"]() - subjects["products"]()).abs().max())
        found = {name: each.median for name, each in alternate(subjects, settings.rounds).items()}
        operations = OPERATIONS * tiles.count * tiles.queries * tiles.keys * SIZE
        for name, each in gains.items():
            each.append(found["flash"] / found[name])
        rows.append(
            {
                "name": str(tiles),
                "error": error,
                **{name: operations / seconds for name, seconds in found.items()},
            }
        )
    means: dict[str, Json] = {name: geometric_mean(each) for name, each in gains.items()}
    return {"size": SIZE, "rows": rows, "gain": means}
