"""Sums of features in chunks: states, outputs, the gradients of queries, of keys, of values.

    y_i = sum over j <= i of exp(t_j - r_i) (f_i . g_j) w_j

for features f of queries and g of keys, values with a 1 behind them w, and frames t, r: what
`factored/features/sums.py` says in tensor products. What comes before a chunk is added up in two
levels, so that one head is many programs: `along` adds up the chunks of a segment, one after the
other, and `carry` the segments. Sums that are not causal are those of all segments. In the backward
pass states hold the gradients of what comes after, by the same two kernels in the other direction.
A program writes places of its own, so that every run gives the same bits. Sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnspec.backends.triton.blocks import put, taken
from attnspec.backends.triton.sums.blocks import (
    entering,
    fading,
    features_of,
    kept_at,
    keys_of,
    only_if,
    part_of,
    product,
    put_gradient,
    queries_of,
    state_of,
    staying,
    totals_of,
    weighed,
)


@triton.jit
def task_of(blocks, heads, count):
    """What a program does: line and query head, chunk or segment, block of columns."""
    place = tl.program_id(0)
    block, place = place % blocks, place // blocks
    number, place = place % count, place // count
    return place // heads, place % heads, number, block


@triton.jit
def above_of(above, line, queries, columns, plan):
    """Columns of the gradients of the sums of some queries, from a tuple of tensors: the gradients
    of outputs, what these are divided by, and the gradients of the sums of weights."""
    share = taken(above[1], line, queries)
    return part_of(above[0], line, queries, columns, plan) * share[:, None]


# --- states ---------------------------------------------------------------------------------------


@triton.jit
def added(state, x, w, frames, task, columns, plan, back: tl.constexpr):
    """A state and its sums of weights after one more chunk: of keys x and values w, or on the way
    back of queries x and the gradients w of their sums."""
    values, total = state
    line, number = task
    if back:
        for head in range(plan.ratio):
            queries = queries_of(number, head, plan)
            one = features_of(x, line, queries, columns[0], plan)
            one = entering(one, frames, line, number, plan)
            other = above_of(w, line, queries, columns[1], plan)
            values += product(tl.trans(one), other, plan)
            if plan.divides:
                total += tl.sum(one * taken(w[2], line, queries)[:, None], 0)
    else:
        keys = keys_of(frames, line, number, plan)
        one = staying(features_of(x, line, keys, columns[0], plan), frames, line, number, plan)
        other = part_of(w, line, keys, columns[1], plan)
        values += product(tl.trans(one), other, plan)
        total += tl.sum(one, 0)
    return values, total


@triton.jit
def along(x, w, frames, states, plan, back: tl.constexpr):
    """Writes the states of chunks within their segment, and those of whole segments."""
    blocks = plan.wides * plan.talls
    line, _, segment, block = task_of(blocks, 1, states.number)
    wide = block // plan.talls * plan.wide + tl.arange(0, plan.wide)
    tall = block % plan.talls * plan.tall + tl.arange(0, plan.tall)
    state = tl.zeros([plan.wide, plan.tall], plan.sums), tl.zeros([plan.wide], plan.sums)
    first, none = block % plan.talls == 0, tl.zeros([1], tl.int32)
    for step in range(states.length):
        number = segment * states.length + step
        if back:
            number = (segment + 1) * states.length - 1 - step
        if plan.causal:
            place, inside = line * states.count + number, number < states.count
            at, there = kept_at(states.chunks, place, wide, tall, plan)
            tl.store(at, state[0], mask=only_if(inside, there))
            at, there = kept_at(states.chunks, place, wide, none, plan, True)
            tl.store(at, state[1][:, None], mask=only_if(inside & first, there))
        since, until = number * plan.chunk - 1, (number + 1) * plan.chunk - 1
        left = fading(frames, line, since, until, plan)
        state = state[0] * left, state[1] * left
        state = added(state, x, w, frames, (line, number), (wide, tall), plan, back)
    place = line * (states.number + 1) + segment
    at, there = kept_at(states.segments, place, wide, tall, plan)
    tl.store(at, state[0], mask=there)
    at, there = kept_at(states.segments, place, wide, none, plan, True)
    tl.store(at, state[1][:, None], mask=only_if(first, there))


@triton.jit
def carry(frames, states, blocks, plan, size: tl.constexpr, back: tl.constexpr):
    """Puts in place of what each segment adds what the others have before it, or in the backward
    pass behind it, and in the end what all have."""
    line, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    at = block * size + tl.arange(0, size)
    there = at < plan.width
    sums = tl.zeros([size], plan.sums)
    many = states.length * plan.chunk
    for step in range(states.number):
        segment = states.number - 1 - step if back else step
        own = tl.cast(line, tl.int64) * (states.number + 1) + segment
        place = states.segments + own * plan.width + at
        more = tl.load(place, mask=there, other=0.0)
        tl.store(place, sums, mask=there)
        left = fading(frames, line, segment * many - 1, (segment + 1) * many - 1, plan)
        sums = sums * left + more
    own = tl.cast(line, tl.int64) * (states.number + 1) + states.number
    tl.store(states.segments + own * plan.width + at, sums, mask=there)


# --- outputs --------------------------------------------------------------------------------------


@triton.jit
def divisor_of(total, log, plan):
    """What a sum of weights divides by, as `divisor` of `factored/text_of_sums.py` says."""
    unit = tl.full(total.shape, 1.0, total.dtype)
    # made where it is used alone: 0 times a unit that overflows would be no number
    if plan.logged and (plan.added > 0 or plan.floor > 0 or plan.least > 0):
        unit = tl.exp(-log)
    if plan.added > 0:
        total = total + plan.added * unit
    if plan.floor > 0:
        least = plan.floor * unit
        total = tl.where(total >= least, total, least)
    elif plan.least > 0:
        least = plan.least * unit
        near = tl.where(total < 0, -least, least)
        total = tl.where(tl.abs(total) >= least, total, near)
    if plan.logged:
        total = tl.where(tl.abs(total) >= plan.tiny, total, plan.tiny)
    return tl.where(total == 0, 1.0, total)


@triton.jit
def outputs(f, g, v, out, totals, logs, frames, states, plan):
    """Writes the outputs of the queries of a chunk, and the sums of their weights."""
    chunks = tl.cdiv(plan.first + plan.queries, plan.chunk)
    line, head, number, block = task_of(plan.talls, plan.ratio, chunks)
    tall = block * plan.tall + tl.arange(0, plan.tall)
    queries = queries_of(number, head, plan)
    keys = keys_of(frames, line, number, plan)
    found = tl.zeros([plan.chunk, plan.tall], plan.sums)
    pairs = tl.zeros([plan.chunk, plan.chunk], plan.sums)
    total = tl.zeros([plan.chunk, 1], plan.sums)
    for low in range(0, plan.features, plan.wide):
        wide = low + tl.arange(0, plan.wide)
        mine = features_of(f, line, queries, wide, plan)
        before = state_of(states, frames, line, number, wide, tall, plan, False)
        found += product(mine, before, plan, True)
        if plan.divides:
            sums = totals_of(states, frames, line, number, wide, plan, False)
            total += tl.sum(mine * sums[None, :], 1)[:, None]
        if plan.causal:
            theirs = features_of(g, line, keys, wide, plan)
            pairs += product(mine, tl.trans(theirs), plan)
    if plan.causal:
        found = entering(found, frames, line, number, plan)
        total = entering(total, frames, line, number, plan)
        pairs = weighed(pairs, frames, line, number, plan)
        values = part_of(v, line, keys, tall, plan)
        found += product(pairs, values, plan)
        total += tl.sum(pairs, 1)[:, None]
    log = taken(logs, line, queries)[:, None] if plan.logged else 0.0
    if plan.divides:
        found = found / divisor_of(total, log, plan)
        first = 0, queries[1], only_if(block == 0, queries[2]), head
        put(totals, line, first, tl.sum(total, 1))
    elif plan.logged:
        found = found * tl.exp(log)
    put(out, line, queries, found, tall)


# --- gradients ------------------------------------------------------------------------------------


@triton.jit
def pairs_back(above, v, line, queries, keys, plan):
    """The gradients of the products of the pairs of a chunk, before what frames leave of them."""
    pairs = tl.zeros([plan.chunk, plan.chunk], plan.sums)
    for low in range(0, plan.size, plan.tall):
        tall = low + tl.arange(0, plan.tall)
        mine = above_of(above, line, queries, tall, plan)
        values = part_of(v, line, keys, tall, plan)
        pairs += product(mine, tl.trans(values), plan)
    if plan.divides:
        pairs += taken(above[2], line, queries)[:, None]
    return pairs


@triton.jit
def of_features(f, g, v, above, into, frames, states, plan, back: tl.constexpr):
    """Writes the gradients of queries, in the other direction those of keys, or of the features of
    either."""
    ratio, rows = (1, plan.keys) if back else (plan.ratio, plan.first + plan.queries)
    chunks = tl.cdiv(rows, plan.chunk)
    line, head, number, block = task_of(plan.wides, ratio, chunks)
    wide = block * plan.wide + tl.arange(0, plan.wide)
    queries = queries_of(number, head, plan)
    keys = keys_of(frames, line, number, plan)
    gradient = tl.zeros([plan.chunk, plan.wide], plan.sums)
    for low in range(0, plan.size, plan.tall):
        tall = low + tl.arange(0, plan.tall)
        if back:
            mine = part_of(v, line, keys, tall, plan)
        else:
            mine = above_of(above, line, queries, tall, plan)
        state = state_of(states, frames, line, number, wide, tall, plan, back)
        gradient += product(mine, tl.trans(state), plan, True)
    if plan.divides:
        sums = totals_of(states, frames, line, number, wide, plan, back)[None, :]
        gradient += sums if back else taken(above[2], line, queries)[:, None] * sums
    if back:
        gradient = staying(gradient, frames, line, number, plan)
    else:
        gradient = entering(gradient, frames, line, number, plan)
    if plan.causal:
        for other in range(0 if back else head, plan.ratio if back else head + 1):
            others = queries_of(number, other, plan)
            pairs = pairs_back(above, v, line, others, keys, plan)
            pairs = weighed(pairs, frames, line, number, plan)
            if back:
                theirs = features_of(f, line, others, wide, plan)
                gradient += product(tl.trans(pairs), theirs, plan)
            else:
                gradient += product(pairs, features_of(g, line, keys, wide, plan), plan)
    if back:
        put_gradient(into, g, gradient, line, keys, keys[1] < plan.keys, wide, plan)
    else:
        put_gradient(into, f, gradient, line, queries, queries[2], wide, plan)


@triton.jit
def of_values(f, g, above, into, frames, states, plan):
    """Writes the gradients of values."""
    chunks = tl.cdiv(plan.keys, plan.chunk)
    line, _, number, block = task_of(plan.talls, 1, chunks)
    tall = block * plan.tall + tl.arange(0, plan.tall)
    keys = keys_of(frames, line, number, plan)
    gradient = tl.zeros([plan.chunk, plan.tall], plan.sums)
    for low in range(0, plan.features, plan.wide):
        wide = low + tl.arange(0, plan.wide)
        theirs = features_of(g, line, keys, wide, plan)
        behind = state_of(states, frames, line, number, wide, tall, plan, True)
        gradient += product(theirs, behind, plan, True)
    gradient = staying(gradient, frames, line, number, plan)
    if plan.causal:
        for other in range(plan.ratio):
            queries = queries_of(number, other, plan)
            pairs = tl.zeros([plan.chunk, plan.chunk], plan.sums)
            for low in range(0, plan.features, plan.wide):
                wide = low + tl.arange(0, plan.wide)
                mine = features_of(f, line, queries, wide, plan)
                theirs = features_of(g, line, keys, wide, plan)
                pairs += product(mine, tl.trans(theirs), plan)
            pairs = weighed(pairs, frames, line, number, plan)
            mine = above_of(above, line, queries, tall, plan)
            gradient += product(tl.trans(pairs), mine, plan)
    put(into, line, (0, keys[1], keys[1] < plan.keys, 0), gradient, tall)
