"""What the kernels of sums share: which rows a chunk has, their features, what a frame leaves.

Every key head of a sample is a line. A chunk is `chunk` positions one after the other, a segment
`length` chunks. Queries are the last `queries` of `keys` positions where sums are causal, so that
the row of a query is its position less `first`; where they are not, both sides are counted from 0.
Fields that are said to be constant are part of what is compiled.
"""

from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from attnspec.backends.triton.blocks import put, taken

Frames = namedtuple("Frames", "padding keys rows")
"""Which keys there are, uint8 [lines, n_k], and the frames t of keys and r of rows [lines, n_k], as
in `factored/features/sums.py`, float32 or float64; never read where there are none."""

States = namedtuple("States", "chunks segments count number length")
"""Sums [m, e], and behind them those of the weights [m] where these are divided by, all in one
line: of each chunk what its segment has added before it, [lines, count, …], in the backward pass
behind it; of each segment what the others have, [lines, segments + 1, …], in the end of all."""

Plan = namedtuple(
    "Plan",
    "ratio queries keys first wides talls features size width chunk wide tall causal framed"
    " padded divides logged map kind precision sums added least floor tiny",
)
"""The sizes of a launch: query heads of a line, rows of both sides, the position of query row 0,
blocks of features and of values.

Constant: so many features, the size of values, the numbers in a line of states, the sides of
blocks; whether sums are causal, in frames, with padding, divided, and whether queries have frames
of their own; the feature map, 0 where features are given; the type and the precision of what is
multiplied, and the type of sums; the numbers of `divisor` in `factored/text_of_sums.py`, and the
least sum in frames that is one."""


@triton.jit
def product(a, b, plan, of_sums: tl.constexpr = False):
    """a [m, d] times b [d, n]; sums among them have more digits and a greater range."""
    kind: tl.constexpr = plan.sums if of_sums else plan.kind
    return tl.dot(a.to(kind), b.to(kind), input_precision=plan.precision, out_dtype=plan.sums)


@triton.jit
def only_if(known, there):
    """Which places of a block there are, none unless a number is known: the interpreter of Triton
    3.9 takes no comparison of numbers in a mask."""
    return tl.where(known, there, False)


# --- rows -----------------------------------------------------------------------------------------


@triton.jit
def queries_of(number, head, plan):
    """The queries of a chunk as a block."""
    rows = number * plan.chunk + tl.arange(0, plan.chunk) - plan.first
    return 0, rows, (rows >= 0) & (rows < plan.queries), head


@triton.jit
def keys_of(frames, line, number, plan):
    """The keys of a chunk as a block, padding not among them."""
    rows = number * plan.chunk + tl.arange(0, plan.chunk)
    there = rows < plan.keys
    if plan.padded:
        there = there & (taken(frames.padding, line, (0, rows, there, 0)) != 0)
    return 0, rows, there, 0


@triton.jit
def part_of(x, line, block, columns, plan):
    """Some columns of rows, 0 where there are none, in the type of sums."""
    return taken(x, line, block, 0, columns).to(plan.sums)


@triton.jit
def features_of(x, line, block, columns, plan):
    """Some features of rows, by the map of the plan, 0 where there are none."""
    features = part_of(x, line, block, columns, plan)
    if plan.map == 1:
        one = tl.exp(tl.minimum(features, 0.0)) + tl.maximum(features, 0.0)
        features = tl.where(block[2][:, None] & (columns < x.size)[None, :], one, 0.0)
    elif plan.map == 2:
        features = tl.maximum(features, 0.0)
    elif plan.map == 3:
        features = tl.maximum(features, 0.0)
        features = features * features
    return features


@triton.jit
def put_gradient(into, x, grad, line, block, there, columns, plan):
    """Write the gradient of some columns of rows x, where `grad` is that of their features, 0 where
    `there` are others than those of the block."""
    features = part_of(x, line, block, columns, plan)
    if plan.map == 1:
        grad = grad * tl.exp(tl.minimum(features, 0.0))
    elif plan.map == 2:
        grad = tl.where(features > 0, grad, 0.0)
    elif plan.map == 3:
        grad = grad * 2 * tl.maximum(features, 0.0)
    every = 0, block[1], there, block[3]
    put(into, line, every, tl.where(block[2][:, None], grad, 0.0), columns)


# --- frames ---------------------------------------------------------------------------------------


@triton.jit
def frame_at(frames, line, position, plan):
    """The frame of a row, or of rows; none is before the first or behind the last."""
    near = tl.minimum(tl.maximum(position, 0), plan.keys - 1)
    return tl.load(frames.rows + tl.cast(line, tl.int64) * plan.keys + near)


@triton.jit
def frames_of_keys(frames, line, number, plan):
    """The frames of the keys of a chunk, -inf behind the last."""
    rows = number * plan.chunk + tl.arange(0, plan.chunk)
    at = frames.keys + tl.cast(line, tl.int64) * plan.keys + rows
    return tl.load(at, mask=rows < plan.keys, other=float("-inf"))


@triton.jit
def fading(frames, line, since, until, plan):
    """What is left at a row of what had the frame of another before it; 1 without frames."""
    if plan.framed:
        decay = frame_at(frames, line, since, plan) - frame_at(frames, line, until, plan)
        return tl.exp(decay.to(plan.sums))
    else:
        return 1.0


@triton.jit
def entering(x, frames, line, number, plan):
    """Rows of a chunk brought to the frame of the state before it."""
    if plan.framed and plan.causal:
        rows = number * plan.chunk + tl.arange(0, plan.chunk)
        x = x * fading(frames, line, number * plan.chunk - 1, rows, plan)[:, None]
    return x


@triton.jit
def staying(x, frames, line, number, plan):
    """Rows of keys of a chunk brought to the frame of the state after it."""
    if plan.framed:
        last = frame_at(frames, line, (number + 1) * plan.chunk - 1, plan)
        left = frames_of_keys(frames, line, number, plan) - last
        x = x * tl.exp(left.to(plan.sums))[:, None]
    return x


@triton.jit
def weighed(pairs, frames, line, number, plan):
    """Products of the pairs of a chunk with what frames leave of them, 0 where a key is later."""
    at = tl.arange(0, plan.chunk)
    if plan.framed:
        rows = frame_at(frames, line, number * plan.chunk + at, plan)
        apart = frames_of_keys(frames, line, number, plan)[None, :] - rows[:, None]
        apart = tl.where(at[None, :] <= at[:, None], apart, float("-inf"))
        return pairs * tl.exp(apart.to(plan.sums))
    else:
        return tl.where(at[None, :] <= at[:, None], pairs, 0.0)


# --- states ---------------------------------------------------------------------------------------


@triton.jit
def kept_at(states, line, features, values, plan, total: tl.constexpr = False):
    """The addresses of a block [wide, tall] of a state, and which there are; of the `total` of the
    weights behind it [wide, 1], at value 0."""
    at = states + tl.cast(line, tl.int64) * plan.width
    if total:
        at = at + plan.features * plan.size + features[:, None] + values[None, :]
        return at, (features < plan.features)[:, None] & (plan.divides > 0)
    else:
        at = at + features.to(tl.int64)[:, None] * plan.size + values[None, :]
        return at, (features < plan.features)[:, None] & (values < plan.size)[None, :]


@triton.jit
def state_of(
    states,
    frames,
    line,
    number,
    features,
    values,
    plan,
    back: tl.constexpr,
    total: tl.constexpr = False,
):
    """A block [wide, tall] of the state before a chunk, in the backward pass behind it; of sums
    that are not causal that of all."""
    last = line * (states.number + 1)
    if plan.causal:
        segment, chunk = number // states.length, plan.chunk
        if back:
            since, until = (number + 1) * chunk - 1, (segment + 1) * states.length * chunk - 1
        else:
            since, until = segment * states.length * chunk - 1, number * chunk - 1
        left = fading(frames, line, since, until, plan)
        this = line * states.count + number
        at, there = kept_at(states.chunks, this, features, values, plan, total)
        state = tl.load(at, mask=there, other=0.0)
        at, there = kept_at(states.segments, last + segment, features, values, plan, total)
        return state + tl.load(at, mask=there, other=0.0) * left
    else:
        at, there = kept_at(states.segments, last + states.number, features, values, plan, total)
        return tl.load(at, mask=there, other=0.0)


@triton.jit
def totals_of(states, frames, line, number, features, plan, back: tl.constexpr):
    """The sums of weights [wide] beside it."""
    value = tl.zeros([1], tl.int32)
    return tl.sum(state_of(states, frames, line, number, features, value, plan, back, True), 1)
