"""What the kernels share: where the rows of a tile lie, which pairs are held, what scores become.

A block is some rows of a tile, whose size need not be that of its blocks; on the side of queries it
may have them once for each head of a group that shares keys. Kernels have it as four: the places in
the tile, the rows, which of them there are, and the heads. Fields that are said to be constant are
part of what is compiled; fields of kernels have no types in Python.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from attnspec.backends.common import dropping
from attnspec.graphs import counter_rng

LOG2E = tl.constexpr(1.4426950408889634)
DROPOUT = tl.constexpr(counter_rng.DROPOUT)
UNREAD = tl.constexpr(32 - dropping.BITS)


Rows = namedtuple("Rows", "at samples heads rows size block", defaults=(None, None))
"""A tensor [B, heads, n, size] or [B, heads, n], its last axis in one piece: where it begins, and
its strides. Constant: the size, and the power of 2 from it on, None of one number for each row."""

Side = namedtuple("Side", "rows samples size parts block count", defaults=(None, None, None))
"""One side of tiles: the rows of each, int32 [B or 1, tiles, size], -1 for none, those of the next
sample `samples` numbers further; `parts` blocks of `block` rows make a tile. Constant: `block`, and
`count`, which is `block` times the heads of a group."""

Lists = namedtuple("Lists", "programs tiles kinds count samples")
"""What programs do: int32 [B or 1, count, 5], a tile, where its entries begin, where those with
masks begin, where they end, and the slot for what they find, -1 for its own place; those of the
next sample lie `samples` numbers further. `tiles` and `kinds` are the other side's tile of each
entry and the number of its mask."""

Look = namedtuple(
    "Look",
    "kind code changes numbers heads buckets farthest table stride learned groups ratio group words"
    " height width first padding padded labels alike whole scale seed least factor line lines",
)
"""What kernels are told of a call, beside its tensors and tiles.

`groups` of `group` query heads in each sample, one to a program, of which `ratio` groups share a
key head. Masks as bits, int32 [masks, height, width], 32 keys in a word. The position of query row
0; padding of keys, where it is `padded`; labels that a pair must have in common, in place of heads,
`alike` of them.

Scores have the factor `scale`, then `changes`: a digit of `code` for each, 1 softcap, 2 alibi, 3
bias, and its number for each of so many heads; the buckets of the distances from -farthest to
farthest, and the table [heads, buckets], its rows `stride` apart. `learned` is at least as many as
there are buckets, a power of 2, or 1 where no gradient of the table is asked for.

Weights are dropped where there is a seed, as `attnspec.backends.common.dropping` says: the least
number that is kept and what such weights are multiplied with; the first line, and so many `lines`
in each sample.

Constant: `alike`, `padded`, `whole`, whether key tiles are whole blocks, `kind`, the type of sums,
`code`, `changes` and `learned`.
"""


@triton.jit
def rows_of(side, sample, tile, part):
    """The places of a block in its tile, its rows, and which of them there are, [count]."""
    at = part * side.block + tl.arange(0, side.count) % side.block
    table = side.rows + tl.cast(sample, tl.int64) * side.samples + tile * side.size
    rows = tl.load(table + at, mask=at < side.size, other=-1)
    return at, rows, rows >= 0


@triton.jit
def places_of(x, sample, block, columns):
    """The addresses of some columns, by default all, of the rows of a block, [m, size], or of one
    number for each [m], and which there are."""
    start = tl.cast(block[3], tl.int64) * x.heads + block[1].to(tl.int64) * x.rows
    at = x.at + tl.cast(sample, tl.int64) * x.samples + start
    if x.block is None:
        return at, block[2]
    else:
        if columns is None:
            columns = tl.arange(0, x.block)
        return at[:, None] + columns[None, :], block[2][:, None] & (columns < x.size)[None, :]


@triton.jit
def taken(x, sample, block, other=0, columns=None):
    """The rows of a block of a tensor, `other` where there are none."""
    at, there = places_of(x, sample, block, columns)
    return tl.load(at, mask=there, other=other)


@triton.jit
def put(x, sample, block, rows, columns=None):
    """Write the rows of a block of a tensor."""
    at, there = places_of(x, sample, block, columns)
    tl.store(at, rows.to(x.at.dtype.element_ty), mask=there)


@triton.jit
def product(a, b, kind: tl.constexpr):
    """a [m, d] times b [d, n], summed in a type."""
    return tl.dot(a, b, input_precision="ieee", out_dtype=kind)


@triton.jit
def held_in(look, number, q_at, k_at):
    """Whether a mask holds the pairs of places of both sides, bool [m, n]."""
    line = (number.to(tl.int64) * look.height + q_at) * look.width
    inside = (q_at < look.height)[:, None] & (k_at // 32 < look.width)[None, :]
    words = tl.load(look.words + line[:, None] + (k_at // 32)[None, :], mask=inside, other=0)
    return ((words >> (k_at % 32)[None, :]) & 1) != 0


@triton.jit
def tanh(x):
    """tanh, by its series where the formula would cancel."""
    square = x * x
    fine = 2.0 / 15 - square * (17.0 / 315 - square * (62.0 / 2835))
    series = 1.0 + square * (-1.0 / 3 + square * fine)
    grown = tl.exp(2.0 * tl.minimum(tl.maximum(x, -20.0), 20.0))
    formula = (grown - 1.0) / (grown + 1.0)
    return tl.where(square < (0.0 if x.dtype == tl.float64 else 0.0625), x * series, formula)


@triton.jit
def bucket_of(look, apart):
    """The bucket of each distance."""
    near = tl.minimum(tl.maximum(apart, -look.farthest), look.farthest)
    return tl.load(look.buckets + near + look.farthest)


@triton.jit
def changed(scores, look, heads, apart):
    """What scaled scores [m, n] of pairs so far apart become, their slope, and the slope of what
    was made of them after a bias."""
    slope = tl.full(scores.shape, 1.0, scores.dtype)
    since = slope
    for number in tl.static_range(look.changes):
        own = look.numbers + number * look.heads + heads
        if look.code // 4**number % 4 == 1:
            cap = tl.load(own)[:, None].to(scores.dtype)
            bent = tanh(scores / cap)
            fall = 1.0 - bent * bent
            scores, slope, since = cap * bent, slope * fall, since * fall
        elif look.code // 4**number % 4 == 2:
            slant = tl.load(own)[:, None].to(scores.dtype)
            scores = scores - slant * tl.abs(apart).to(scores.dtype)
        else:
            table = look.table + heads[:, None] * look.stride
            scores = scores + tl.load(table + bucket_of(look, apart)).to(scores.dtype)
            since = tl.full(since.shape, 1.0, since.dtype)
    return scores, slope, since


@triton.jit
def keys_of(side, entry, look, sample, head):
    """A block of keys, of a tile and which of its blocks; keys that are padding are not there."""
    at, rows, inside = rows_of(side, sample, entry[0], entry[1])
    if look.padded:
        inside = inside & (taken(look.padding, sample, (at, rows, inside, head)) != 0)
    return at, rows, inside, head


@triton.jit
def are_alike(look, sample, queries, keys):
    """Whether pairs of two blocks have all labels in common, bool [m, n]."""
    mask = queries[2][:, None] & keys[2][None, :]
    for label in tl.static_range(look.alike):
        at = sample * 0 + label
        of_q = taken(look.labels, sample, (0, queries[1] + look.first, queries[2], at))
        of_k = taken(look.labels, sample, (0, keys[1], keys[2], at))
        mask = mask & (of_q[:, None] == of_k[None, :])
    return mask


@triton.jit
def scores_of(q, k, queries, keys, look, sample, number, masked: tl.constexpr):
    """The scores of the pairs of two blocks to base 2, -inf where a pair is not held, and their
    slopes."""
    scores = product(q, tl.trans(k), look.kind)
    slope, since = 1.0, 1.0
    if look.changes > 0:
        apart = (queries[1] + look.first)[:, None] - keys[1][None, :]
        scores, slope, since = changed(scores * look.scale, look, queries[3], apart)
        scores = scores * LOG2E
    else:
        scores = scores * (look.scale * LOG2E)
    if masked or look.padded or look.alike > 0 or look.changes > 0 or not look.whole:
        mask = are_alike(look, sample, queries, keys)
        if masked:
            mask = mask & held_in(look, number, queries[0], keys[0])
        scores = tl.where(mask, scores, float("-inf"))
        if look.changes > 0:
            # what is no pair, as a row that only fills up, may have none
            slope, since = tl.where(mask, slope, 0.0), tl.where(mask, since, 0.0)
    return scores, slope, since


@triton.jit
def kept(weights, look, sample, queries, keys):
    """Weights [m, n] of the pairs of two blocks without those that are dropped."""
    line = look.line + sample * look.lines + queries[3]
    none = tl.zeros(weights.shape, tl.int32)
    query, key = queries[1][:, None] + none, keys[1][None, :] + none
    word, _, _, _ = tl.philox(tl.load(look.seed), query, key, line[:, None] + none, none + DROPOUT)
    number = (word >> UNREAD).to(tl.int32)
    return tl.where(number >= look.least, weights * look.factor, 0.0)
