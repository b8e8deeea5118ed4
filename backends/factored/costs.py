"""What mechanisms hold and move beside q, k, v and the output, on the CPU, forward.

Counted in numbers, by the products of their formulas as `backends.factored.kernels` computes them:
features by blocks of positions, synthesised weights whole; fused softmax keeps none. What is held
is for all heads of a layer; what is moved counts every intermediate result once as written and once
as read, for one head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from attnspec.backends.factored.hybrid.lag import lagged
from attnspec.ir.mechanisms.declaration import MechanismDeclaration
from attnspec.ir.mechanisms.linformer import Linformer
from attnspec.ir.mechanisms.nystrom import Nystrom
from attnspec.ir.mechanisms.synthesizer import Synthesizer
from attnspec.layout.steps import bands_of
from attnspec.layout.tiling import survey
from attnspec.limits import LIMITS
from attnspec.lower.mechanism_costs import backward_flops_of, flops_of, pair_flops_of, row_flops_of
from attnspec.lower.work import Work, mechanism_of

LANES = 16
"""Keys from which on it may be: with fewer than a vector has lanes torch's kernel makes zeros of
scores that are no numbers."""


@dataclass(frozen=True)
class Shape:
    """n positions of `heads` heads of `size`; `causal` sums are computed by chunks."""

    n: int
    size: int
    heads: int
    causal: bool

    @property
    def tensor(self) -> int:
        """Numbers of one of q, k, v of one head."""
        return self.n * self.size


def held(declaration: MechanismDeclaration, shape: Shape) -> int:
    """The most numbers that all heads hold at one time beside q, k, v and the output."""
    how = _summed if declaration.sums else _HELD[declaration.name]
    return how(shape, declaration) if shape.n else 0


def moved(declaration: MechanismDeclaration, shape: Shape) -> int:
    """The numbers that one head reads and writes, q, k, v and the output among them."""
    how = _features if declaration.sums else _BETWEEN[declaration.name]
    return 4 * shape.tensor + (2 * how(shape, declaration) if shape.n else 0)


# --- sums of features -----------------------------------------------------------------------------


def _summed(shape: Shape, declared: MechanismDeclaration) -> int:
    width, size = declared.feature_width(shape.size), shape.size
    rows = min(shape.heads * shape.n, max(1, LIMITS.piece // max(width, size)))
    together = min(shape.heads, max(1, -(-rows // max(1, shape.n))))
    # features of queries and keys; values with a 1 behind, sums, and what maps are made of
    found = rows * (2 * width + 3 * size) + 2 * together * width * (size + 1)
    if shape.causal:
        found += rows * (
            3 * LIMITS.feature_chunk // 2 + 2 * width * (size + 1) // LIMITS.feature_chunk
        )
    return found


def _features(shape: Shape, declared: MechanismDeclaration) -> int:
    width, n = declared.feature_width(shape.size), shape.n
    found = 2 * n * width + width * (shape.size + 1)
    if shape.causal:
        found += n * LIMITS.feature_chunk + -(-n // LIMITS.feature_chunk) * width * (shape.size + 1)
    return found


# --- softmax with few keys ------------------------------------------------------------------------


def _weights(shape: Shape, keys: int) -> int:
    """Scores and weights of all positions with these keys, which fused attention does not keep."""
    return 2 * shape.heads * shape.n * keys if keys < LANES else 0


def _linformer_held(shape: Shape, declared: Linformer) -> int:
    keys = declared.projected(shape.n)
    return 4 * shape.heads * keys * shape.size + _weights(shape, keys)


def _nystrom_held(shape: Shape, declared: Nystrom) -> int:
    marks = min(declared.landmarks, max(1, shape.n))
    few = shape.heads * (4 * marks * shape.size + 6 * marks * marks)
    local = shape.heads * shape.tensor // 2 if declared.conv else 0
    return few + local + _weights(shape, marks)


def _synthesizer_held(shape: Shape, declared: Synthesizer) -> int:
    fused = not shape.causal or shape.heads * shape.n * shape.n >= LIMITS.fused
    if fused and declared.kind in ("dense", "factorized_random"):
        # rows, columns and values of one width, and what comes of them
        return 4 * shape.heads * shape.tensor
    return shape.heads * _synthesized(shape, declared)


def _synthesized(shape: Shape, declared: Synthesizer) -> int:
    """Tables of all pairs of one head: what is synthesised, what it is changed to, weights."""
    pairs = shape.n * shape.n
    found = 2 * pairs + (2 * pairs if declared.products else 0)
    match declared.kind:
        case "random":
            return found
        case "factorized_dense":
            # two factors multiplied for the longest sequence, and cut
            return found + shape.n * declared.max_length
        case _:
            return found + pairs


_HELD: dict[str, Callable[[Shape, Any], int]] = {
    "efficient": lambda s, _: 2 * s.heads * s.tensor,
    "linformer": _linformer_held,
    "nystrom": _nystrom_held,
    "synthesizer": _synthesizer_held,
    "mixer": lambda s, declared: s.heads * (2 * s.tensor + 2 * declared.hidden * s.size),
    "gmlp": lambda s, _: 2 * s.heads * s.tensor,
    "fourier": lambda s, _: 2 * s.heads * s.tensor,
}
"""What mechanisms hold whose weights are no products of features."""

_BETWEEN: dict[str, Callable[[Shape, Any], int]] = {
    "efficient": lambda s, _: 2 * s.tensor + s.size * s.size,
    # weights, projected keys and values, and the projections themselves
    "linformer": lambda s, declared: declared.projected(s.n) * (2 * s.n + 2 * s.size),
    "nystrom": lambda s, declared: (
        2 * declared.landmarks * (s.n + s.size)
        + declared.landmarks**2 * (4 * declared.iterations or 4)
    ),
    "synthesizer": _synthesized,
    "mixer": lambda s, declared: declared.hidden * (s.size + 2 * s.n),
    "gmlp": lambda s, _: s.tensor + s.n * s.n,
    "fourier": lambda s, _: 2 * s.tensor,
}


@dataclass(frozen=True)
class Products:
    """Operations forward and backward, and numbers moved, of one head; numbers that all heads hold
    besides q, k, v and the output."""

    flops: int
    backward_flops: int
    moved: int
    held: int


def products_of(work: Work, heads: int, size: int) -> Products:
    """What the features of a mechanism take.

    Rows of a hybrid that are weighed pair by pair instead, as the numbers of a call decide, are
    left out: there are few where weights are alike.
    """
    mechanism, steps = mechanism_of(work), list[tuple[int, int]]()
    lag = 0
    if work.hybrid and (work.reads or work.decided):
        # laid out for the inputs of every call; never more than all pairs
        steps = [(work.n_q * work.n_k, work.n_k)]
    elif work.hybrid:
        lag, rest = lagged(work)
        for band in bands_of(rest, work.n_q, work.n_k) if rest is not None else ():
            seen = survey(band.step.relation, work.n_q, work.n_k, band.step.order, band.sizes)
            pairs = round(sum(seen.area))
            steps.append((pairs, pairs // max(1, band.sizes[0])))
    n = max(0, work.n_k - lag)
    shape = Shape(n, size, heads, work.causal)
    found = Products(
        flops_of(mechanism, n, size, work.causal),
        backward_flops_of(mechanism, n, size, work.causal),
        moved(mechanism, shape),
        held(mechanism, shape),
    )
    for pairs, read in steps:
        found = _with_pairs(found, work, (pairs, read), (heads, size))
    if not work.hybrid:
        return found
    # sums of some heads, and what is kept of all of them
    sums = work.n_q * (size + 1)
    beside = min(heads, max(2, LIMITS.product // max(1, sums))) * sums + 4 * heads * work.n_q
    return replace(found, moved=found.moved + 3 * sums, held=found.held + beside)


def _with_pairs(
    before: Products, work: Work, pairs: tuple[int, int], sizes: tuple[int, int]
) -> Products:
    """What the pairs of a step take besides; `pairs` are those of one head, and the keys that its
    blocks read."""
    (count, read), (heads, size) = pairs, sizes
    mechanism = mechanism_of(work)
    forward, backward = pair_flops_of(mechanism, size)
    rows = work.n_q + work.n_k
    features = [rows * each for each in row_flops_of(mechanism, size)]
    width = mechanism.pair_width(size)
    # features and values, features of keys once more in the blocks that read them, and scores
    parts = work.n_q * width, work.n_k * width, work.n_k * (size + 1), read * width, count
    return replace(
        before,
        flops=before.flops + count * forward + features[0],
        backward_flops=before.backward_flops + count * backward + features[1],
        moved=before.moved + 2 * sum(parts) + 2 * count,
        held=max(before.held, sum(min(LIMITS.product, heads * part) for part in parts)),
    )
