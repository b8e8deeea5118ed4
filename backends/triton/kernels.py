"""Softmax attention over lists of tiles: the output, the gradient of queries, those of keys.

A program takes a block of rows of one tile, of one head or one group of heads, and goes through the
blocks of the other side that its list names, whole ones first. Its outputs are merged into those of
its place by their log-sum-exps, its gradients added. A long list is several programs, whose results
go to slots, and from there to their place in order, so that every run gives the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnspec.backends.triton.blocks import (
    LOG2E,
    bucket_of,
    kept,
    keys_of,
    product,
    put,
    rows_of,
    scores_of,
    taken,
)


@triton.jit
def task_of(lists, groups, side):
    """What a program does: the sample and the group of heads, the tile and which of its blocks,
    where whole entries begin and end and where the others end, and the slot, -1 for none."""
    place, count = tl.program_id(0), lists.count * side.parts
    line, group = place % count, place // count
    sample = group // groups
    program = lists.programs + sample.to(tl.int64) * lists.samples + line // side.parts * 5
    span = tl.load(program + 1), tl.load(program + 2), tl.load(program + 3)
    part, slot = line % side.parts, tl.load(program + 4)
    slot = tl.where(slot < 0, -1, slot * side.parts + part)
    return sample, group % groups, tl.load(program), part, span, slot


@triton.jit
def queries_of(side, look, sample, group, tile, part):
    """A block of queries."""
    at, rows, inside = rows_of(side, sample, tile, part)
    which = tl.arange(0, side.count) // side.block
    return at, rows, inside & (which < look.group), group * look.group + which


@triton.jit
def in_slot(slot, group, count: tl.constexpr):
    """The rows of a slot as a block, less than 0 where there is none."""
    rows = slot * count + tl.arange(0, count)
    return rows, rows, rows >= 0, tl.zeros([count], tl.int32) + group


@triton.jit
def in_place(block, slot):
    """A block without rows unless the slot is less than 0, none."""
    return block[0], block[1], block[2] & (slot < 0), block[3]


@triton.jit
def put_either(into, slots, sample, block, slot, group, rows):
    """Write the rows of a block, or write them to their slot."""
    put(into, sample, in_place(block, slot), rows)
    put(slots, sample, in_slot(slot, group, rows.shape[0]), rows)


@triton.jit
def added(into, slots, sample, block, slot, group, rows):
    """Add to the rows of a block, or write them to their slot."""
    rows += taken(into, sample, in_place(block, slot)).to(rows.dtype)
    put_either(into, slots, sample, block, slot, group, rows)


# --- outputs --------------------------------------------------------------------------------------


@triton.jit
def seen(state, q, k, v, queries, entry, ids, sides, look, masked: tl.constexpr):
    """The state of an online softmax after one more block of keys: the greatest scores to base 2,
    the sums of weights, and those of values."""
    top, total, found = state
    keys = keys_of(sides[1], entry, look, ids[0], ids[1])
    rows, values = taken(k, ids[0], keys), taken(v, ids[0], keys)
    scores, _, _ = scores_of(q, rows, queries, keys, look, ids[0], entry[2], masked)
    higher = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    weights, share = tl.exp2(scores - shift[:, None]), tl.exp2(top - shift)
    total = total * share + tl.sum(weights, 1)
    if look.seed is not None:
        weights = kept(weights, look, ids[0], queries, keys)
    found = found * share[:, None] + product(weights.to(values.dtype), values, look.kind)
    return higher, total, found


@triton.jit
def entry_of(lists, place, parts, masked: tl.constexpr):
    """The tile of an entry, which of its blocks, and the number of its mask."""
    number = tl.load(lists.kinds + place // parts) if masked else 0
    return tl.load(lists.tiles + place // parts), place % parts, number


@triton.jit
def begun(parts, sample, block, look):
    """The state of an online softmax that begins with outputs and their log-sum-exps."""
    sums = taken(parts[1], sample, block, float("-inf"))
    total = tl.where(sums > float("-inf"), 1.0, 0.0).to(look.kind)
    return sums * LOG2E, total, taken(parts[0], sample, block).to(look.kind)


@triton.jit
def ended(state):
    """The outputs of an online softmax, and its log-sum-exps, -inf where there is no key."""
    top, total, values = state
    some = tl.where(total > 0, total, 1.0)
    sums = tl.where(total > 0, (top + tl.log2(some)) / LOG2E, float("-inf"))
    return values / some[:, None], sums


@triton.jit
def attend(q, k, v, into, slots, sides, lists, look):
    """Merges into outputs and their log-sum-exps what the lists of query tiles give."""
    sample, group, tile, part, span, slot = task_of(lists, look.groups, sides[0])
    queries = queries_of(sides[0], look, sample, group, tile, part)
    rows, state = taken(q, sample, queries), begun(into, sample, in_place(queries, slot), look)
    ids, parts = (sample, group // look.ratio), sides[1].parts
    for masked in tl.static_range(2):
        for place in range(span[masked] * parts, span[masked + 1] * parts):
            entry = entry_of(lists, place, parts, masked)
            state = seen(state, rows, k, v, queries, entry, ids, sides, look, masked)
    out, sums = ended(state)
    put_either(into[0], slots[0], sample, queries, slot, group, out)
    put_either(into[1], slots[1], sample, queries, slot, group, sums)


@triton.jit
def merge(into, slots, side, spans, look):
    """Merges into outputs and their log-sum-exps what the slots of long lists hold, one after the
    other; `spans` are as `Lists`, with slots in place of entries."""
    sample, group, tile, part, span, _ = task_of(spans, look.groups, side)
    queries = queries_of(side, look, sample, group, tile, part)
    queries = in_place(queries, span[0] - span[2])
    top, total, values = begun(into, sample, queries, look)
    for slot in range(span[0], span[2]):
        one = begun(slots, sample, in_slot(slot * side.parts + part, group, side.count), look)
        higher = tl.maximum(top, one[0])
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        share, more = tl.exp2(top - shift), tl.exp2(one[0] - shift) * one[1]
        top, total = higher, total * share + more
        values = values * share[:, None] + one[2] * more[:, None]
    out, sums = ended((top, total, values))
    put(into[0], sample, queries, out)
    put(into[1], sample, queries, sums)


@triton.jit
def add_up(into, slots, side, spans, look):
    """Adds what the slots of long lists hold, one after the other, to the rows of their tiles."""
    sample, group, tile, part, span, _ = task_of(spans, look.groups, side)
    block = in_place(queries_of(side, look, sample, group, tile, part), span[0] - span[2])
    sums = taken(into, sample, block).to(look.kind)
    for slot in range(span[0], span[2]):
        sums += taken(slots, sample, in_slot(slot * side.parts + part, group, side.count))
    put(into, sample, block, sums)


# --- gradients ------------------------------------------------------------------------------------


@triton.jit
def above_of(above, sample, queries):
    """What the gradients of some queries' scores need, from a tuple of tensors: the gradient of
    their output, their log-sum-exps to base 2, inf where all weights are 0, and the sums of that
    gradient times the output."""
    # what is taken out of a tuple and named has no constants any more
    sums = taken(above[1], sample, queries, float("inf")) * LOG2E
    sums = tl.where(sums == float("-inf"), float("inf"), sums)
    return taken(above[0], sample, queries), sums, taken(above[2], sample, queries)


@triton.jit
def weighed(q, k, v, above, queries, keys, look, sample, number, masked: tl.constexpr):
    """The weights of a block of pairs, but for those dropped, the gradients of their scores before
    changes, and those of what a bias gave."""
    scores, slope, since = scores_of(q, k, queries, keys, look, sample, number, masked)
    weights = tl.exp2(scores - above[1][:, None])
    of_weights = product(above[0], tl.trans(v), look.kind)
    left = weights
    if look.seed is not None:
        left = kept(weights, look, sample, queries, keys)
    of_scores = left * of_weights - weights * above[2][:, None]
    return left, of_scores * slope, of_scores * since


@triton.jit
def queries_back(state, q, k, v, above, queries, entry, ids, sides, look, masked: tl.constexpr):
    """The gradients of queries, and of a bias by buckets, after one more block of keys."""
    sums, buckets = state
    keys = keys_of(sides[1], entry, look, ids[0], ids[1])
    rows, values = taken(k, ids[0], keys), taken(v, ids[0], keys)
    _, of_scores, of_bias = weighed(
        q, rows, values, above, queries, keys, look, ids[0], entry[2], masked
    )
    if look.learned > 1:
        which = bucket_of(look, (queries[1] + look.first)[:, None] - keys[1][None, :])
        numbers = tl.arange(0, look.learned)
        for bucket in range(tl.min(which), tl.max(which) + 1):
            share = tl.sum(tl.where(which == bucket, of_bias, 0.0))
            buckets += tl.where(numbers == bucket, share, 0.0)
    return sums + product(of_scores.to(rows.dtype), rows, look.kind), buckets


@triton.jit
def of_queries(q, k, v, tensors, shares, into, slots, sides, lists, look):
    """Adds to `into` the gradients of queries, by the lists of query tiles, and writes those of the
    table of a bias, each program its share [programs, buckets]."""
    sample, group, tile, part, span, slot = task_of(lists, look.groups, sides[0])
    queries = queries_of(sides[0], look, sample, group, tile, part)
    rows, above = taken(q, sample, queries), above_of(tensors, sample, queries)
    numbers = tl.arange(0, look.learned)
    state = tl.zeros([sides[0].count, q.block], look.kind), tl.zeros_like(numbers).to(look.kind)
    ids, parts = (sample, group // look.ratio), sides[1].parts
    for masked in tl.static_range(2):
        for place in range(span[masked] * parts, span[masked + 1] * parts):
            entry = entry_of(lists, place, parts, masked)
            state = queries_back(state, rows, k, v, above, queries, entry, ids, sides, look, masked)
    added(into[0], slots[0], sample, queries, slot, group, state[0] * look.scale)
    if look.learned > 1:
        place = tl.program_id(0).to(tl.int64) * look.learned
        tl.store(shares + place + numbers, state[1])


@triton.jit
def keys_back(state, q, k, v, tensors, task, entry, keys, sides, look, masked: tl.constexpr):
    """The gradients of keys and values after one more block of queries."""
    of_k, of_v = state
    sample, group = task
    queries = queries_of(sides[0], look, sample, group, entry[0], entry[1])
    rows, above = taken(q, sample, queries), above_of(tensors, sample, queries)
    weights, of_scores, _ = weighed(
        rows, k, v, above, queries, keys, look, sample, entry[2], masked
    )
    of_v += product(tl.trans(weights.to(above[0].dtype)), above[0], look.kind)
    of_k += product(tl.trans(of_scores.to(rows.dtype)), rows, look.kind)
    return of_k, of_v


@triton.jit
def of_keys(q, k, v, tensors, into, slots, sides, lists, look):
    """Adds to `into` the gradients of keys and of values, by the lists of key tiles; one program
    takes all groups of query heads that share a key head."""
    key_heads = look.groups // look.ratio
    sample, head, tile, part, span, slot = task_of(lists, key_heads, sides[1])
    keys = keys_of(sides[1], (tile, part), look, sample, head)
    rows, values = taken(k, sample, keys), taken(v, sample, keys)
    of_k = tl.zeros([sides[1].count, k.block], look.kind)
    of_v = tl.zeros([sides[1].count, v.block], look.kind)
    state, parts = (of_k, of_v), sides[0].parts
    for group in range(head * look.ratio, (head + 1) * look.ratio):
        task = sample, group
        for masked in tl.static_range(2):
            for place in range(span[masked] * parts, span[masked + 1] * parts):
                entry = entry_of(lists, place, parts, masked)
                state = keys_back(
                    state, q, rows, values, tensors, task, entry, keys, sides, look, masked
                )
    added(into[0], slots[0], sample, keys, slot, head, state[0] * look.scale)
    added(into[1], slots[1], sample, keys, slot, head, state[1])
