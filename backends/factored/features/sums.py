"""Attention as sums of features, block by block, in operations that differentiate to any order.

out_i = sum_j (f(q_i) . g(k_j)) v_j / sum_j f(q_i) . g(k_j), over all keys or those with j <= i.
Causal sums go by chunks: what a query reads of its own chunk is a dense product, all before it
comes through a state.

    y_i = sum over j <= i of exp(t_j - r_i) (f_i . g_j) w_j

for features f of queries and g of keys, rows w of values, behind each of them a 1, and frames t, r.
Some chunks make a block, whose chunks are computed at once: f [N, S, R c, m], g [N, S, c, m] and
w [N, S, c, e] for N samples and key heads, S chunks of c positions and the R query heads of a key
head as more rows. A state [N, m, e] holds the sums over all keys before a block, in the frame of
the last of them. The weight of a key depends on no later key, bit by bit: a frame r_i is a maximum
over j <= i. Autograd keeps the features of a block where they are few; else it computes the block
again, so that memory stays that of some tensors like q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch.nn.functional import pad

from attnspec.backends.common.merging import LOWEST
from attnspec.backends.common.torch_modes import Function, derivatives, is_transformed, unseen
from attnspec.backends.factored.features.maps import FeatureMap, Features, Paired, Tables
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.backends.tables.sides import scratch
from attnspec.ir.mechanisms.declaration import WIDE
from attnspec.limits import LIMITS

Finish: TypeAlias = (
    "Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]"
)
"""From sums [..., e], of which exp(log) times as much is meant, and logs [...] or None to what is
wanted of each query: rows [..., e'], and numbers [...] or None."""


@dataclass(frozen=True)
class Summing:
    """How features are summed; `chunk` positions are computed pair by pair, and temporaries have
    about `block` numbers."""

    map: FeatureMap
    causal: bool
    quotient: Quotient
    chunk: int = LIMITS.feature_chunk
    block: int = LIMITS.piece

    @property
    def paired(self) -> Paired | None:
        """The map, if the products of its features have a shorter formula."""
        return self.map if isinstance(self.map, Paired) else None

    def most(self, given: Given) -> int:
        """How many positions of a single key head make a block."""
        size = given.q.shape[-1]
        wide = max(size, given.v.shape[-1], self.map.width(size)) * given.q.shape[2]
        return self.block // max(1, wide)


@dataclass(frozen=True)
class Given:
    """What is summed: q [B, K, R, n_q, d], k [B, K, n_k, d], v [B, K, n_k, d_v], `padding` bool
    [B, n_k] or None, and, of a gate, frames of keys and rows [B, K, n_k] in float64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    padding: torch.Tensor | None
    gate: tuple[torch.Tensor, torch.Tensor] | None
    tables: Tables

    @property
    def kind(self) -> torch.dtype:
        """The type of sums."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that may be differentiated."""
        return self.q, self.k, self.v, *(self.gate or ()), *self.tables.values()

    def gradients(self) -> Given:
        """Tensors to fill with the gradients of q, k and v, and to add those of others to."""
        rows = (x.new_empty(x.shape) for x in self.tensors[:3])
        return given_of(self.frame, (*rows, *(torch.zeros_like(x) for x in self.tensors[3:])))

    @property
    def frame(self) -> Frame:
        """All else, for `given_of`."""
        return self.padding, self.gate is not None, tuple(self.tables)


Frame: TypeAlias = "tuple[torch.Tensor | None, bool, tuple[str, ...]]"
"""Padding, whether there is a gate, and the names of the tables."""


def given_of(frame: Frame, tensors: Sequence[torch.Tensor]) -> Given:
    """What these tensors are, as `Given.tensors` has them."""
    (padding, gated, names), (q, k, v, *rest) = frame, tensors
    gate = (rest.pop(0), rest.pop(0)) if gated else None
    return Given(q, k, v, padding, gate, dict(zip(names, rest, strict=True)))


# --- parts ---------------------------------------------------------------------------------------


def room_of(how: Summing, given: Given) -> tuple[int, int]:
    """How many samples and key heads fit a block with all their positions. Long sequences go head
    by head, so that many positions make a block."""
    together = max(1, how.most(given) // max(1, given.k.shape[2]))
    return max(1, together // max(1, given.k.shape[1])), together


def cut(x: torch.Tensor, room: tuple[int, int]) -> list[torch.Tensor]:
    """[B, K, …] in parts of so many samples and heads, whose gradients are put together again."""
    return [part for some in torch.split(x, room[0]) for part in torch.split(some, room[1], 1)]


def shares(given: Given, room: tuple[int, int]) -> list[Given]:
    """What is given to each of these parts."""
    samples, heads = room
    columns = max(1, -(-given.k.shape[1] // heads))
    tables = {
        name: [x] * columns if len(x) == 1 else torch.split(x, heads)
        for name, x in given.tables.items()
    }
    found = []
    parts = zip(*(cut(x, room) for x in given.tensors[: 5 if given.gate else 3]), strict=True)
    for number, tensors in enumerate(parts):
        row, column = divmod(number, columns)
        real, gated, names = given.frame
        if real is not None:
            real = real[row * samples : (row + 1) * samples]
        mine = *tensors, *(table[column] for table in tables.values())
        found.append(given_of((real, gated, names), mine))
    return found


def joined(parts: list[torch.Tensor], heads: int) -> torch.Tensor:
    """The parts [B', K', …] of all samples and so many heads, as `cut` has them, in one tensor."""
    if len(parts) == 1:
        return parts[0]
    whole, start = [], 0
    while start < len(parts):
        stop, count = start, 0
        while count < heads:
            count, stop = count + parts[stop].shape[1], stop + 1
        whole.append(parts[start] if stop == start + 1 else torch.cat(parts[start:stop], 1))
        start = stop
    return whole[0] if len(whole) == 1 else torch.cat(whole)


def blocks_of(how: Summing, given: Given) -> tuple[list[Given], list[Given]]:
    """Blocks of keys that are summed before any query is looked at, without queries; and blocks of
    queries, with the keys at their positions where sums are causal, else with all."""
    n_q, n_k = given.q.shape[3], given.k.shape[2]
    most = max(1, how.most(given) // max(1, given.k.shape[:2].numel()))
    before = n_k - n_q if how.causal else n_k
    sizes = [_sizes(before, most), _sizes(n_q, most)]
    if how.causal:
        whole = n_q // how.chunk * how.chunk
        rest = [n_q - whole] if n_q > whole or not n_q else []
        sizes[1] = _sizes(whole, max(how.chunk, most // how.chunk * how.chunk)) + rest
    of_keys = [*sizes[0], *sizes[1]] if how.causal else sizes[0]
    keys = zip(
        *(torch.split(x, of_keys, 2) for x in given.tensors[1 : 5 if given.gate else 3]),
        strict=True,
    )
    real: Sequence[torch.Tensor | None] = (None,) * len(of_keys)
    if given.padding is not None:
        real = torch.split(given.padding, of_keys, 1)
    rows = torch.split(given.q, sizes[1], 3)
    queries = [*(given.q[:, :, :, :0] for _ in sizes[0]), *rows][: len(of_keys)]
    _, gated, names = given.frame
    found = [
        given_of((padding, gated, names), (q, *tensors, *given.tables.values()))
        for padding, q, tensors in zip(real, queries, keys, strict=True)
    ]
    if how.causal:
        return found[: len(sizes[0])], found[len(sizes[0]) :]
    return found, [replace(given, q=q) for q in rows]


def _sizes(count: int, step: int) -> list[int]:
    """So many positions in steps, the last of which may be shorter."""
    return [min(step, count - at) for at in range(0, count, step)]


# --- states and frames ---------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The sums over some keys [N, m, e] in the frame `base` [N]; None where nothing is summed."""

    sums: torch.Tensor | None = None
    base: torch.Tensor | None = None

    @property
    def total(self) -> torch.Tensor:
        """The sums; ValueError where nothing is summed."""
        if self.sums is None:
            raise ValueError("there is no key to sum over")
        return self.sums


def no_sums(how: Summing, given: Given) -> torch.Tensor:
    """The sums over no key, [N, m, e]."""
    shape = how.map.width(given.k.shape[-1]), given.v.shape[-1] + how.quotient.divides
    return given.k.new_zeros(given.k.shape[:2].numel(), *shape, dtype=given.kind)


@dataclass(frozen=True)
class Frames:
    """t [N, S, c] and r [N, S, c] of a block, r not falling and t_j <= r_i for all j <= i, counted
    from the states `start` [N, S] before each chunk; `end` [N] is that of the state after all.

    Their type may be wider than that of the sums: differences are rounded, not what they are of.
    """

    keys: torch.Tensor
    rows: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor

    def entering(self, f: torch.Tensor) -> torch.Tensor:
        """Rows [N, S, R c, …] brought to the frame of the state before their chunk."""
        factor = torch.exp((-self.rows).to(f.dtype))
        return f * factor.repeat(1, 1, f.shape[2] // factor.shape[2])[..., None]

    def staying(self, w: torch.Tensor) -> torch.Tensor:
        """Rows [N, S, c, e] as the state after their chunk has them."""
        return w * torch.exp((self.keys - self.rows[..., -1:].detach()).to(w.dtype))[..., None]

    def fades(self, kind: torch.dtype) -> torch.Tensor:
        """What the state before a chunk is multiplied with in the one after it [N, S, 1, 1]."""
        return torch.exp((-self.rows[..., -1].detach()).to(kind))[..., None, None]


def frames_of(
    given: Given, log: torch.Tensor | None, base: torch.Tensor | None, chunk: int
) -> Frames | None:
    """The frames of a block of keys with frames `log` [B, K, n], or those of a gate, whose first
    state is in the frame `base` [N]."""
    if given.gate is not None:
        keys, rows = (x.reshape(x.shape[:2].numel(), -1, chunk) for x in given.gate)
        first = torch.zeros_like(rows[:, 0, 0].detach()) if base is None else base
    elif log is None:
        return None
    else:
        keys = log.detach().reshape(log.shape[:2].numel(), -1, chunk)
        base = keys.new_full(keys.shape[:1], LOWEST) if base is None else base
        rows = torch.cummax(torch.cat([base[:, None], keys.flatten(1)], 1), 1).values[:, 1:]
        # a state that holds nothing has the frame of the first key, which no later one changes
        first = rows.masked_fill(rows <= LOWEST, torch.inf).amin(1)
        first = torch.where(base > LOWEST, base, torch.where(first < torch.inf, first, 0.0))
        rows = torch.maximum(rows, first[:, None]).view(keys.shape)
    # whatever frames states have, they are constants
    start = torch.cat([first[:, None], rows[:, :-1, -1].detach()], 1)
    end = rows[:, -1, -1].detach()
    return Frames(keys - start[..., None], rows - start[..., None], start, end)


def states_of(
    state: torch.Tensor, g: torch.Tensor, w: torch.Tensor, frames: Frames | None, fresh: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states before each chunk [N, S, m, e], where `state` is the first, and the one after the
    last. Where they need not be `fresh` they lie in a buffer that the next block overwrites."""
    count, fades = g.shape[1], None
    if frames is not None:
        w, fades = frames.staying(w), frames.fades(w.dtype).unbind(1)
    if count > 1 and not fresh:
        into = scratch("states", (len(g), count + 1, *state.shape[1:]), g.dtype)
        into[:, 0] = state
        torch.matmul(g.transpose(-1, -2), w, out=into[:, 1:])
        states = into.unbind(1)
        for at in range(count):
            if fades is None:
                states[at + 1].add_(states[at])
            else:
                states[at + 1].addcmul_(states[at], fades[at])
        return into[:, :-1], states[-1].clone()
    found = [state]
    for at, part in enumerate((g.transpose(-1, -2) @ w).unbind(1)):
        found.append((found[-1] if fades is None else found[-1] * fades[at]) + part)
    return torch.stack(found[:-1], 1), found[-1]


# --- blocks --------------------------------------------------------------------------------------


def features_of_keys(how: Summing, given: Given) -> Features:
    """The features [B, K, n, m] of keys, none of padding."""
    found = how.map(given.k.to(given.kind), given.tables)
    if given.padding is None:
        return found
    real = given.padding[:, None]
    log = None if found.log is None else found.log.masked_fill(~real, -torch.inf)
    return Features(found.values.masked_fill(~real[..., None], 0.0), log)


def features_of_queries(how: Summing, q: torch.Tensor, given: Given) -> Features:
    """The features [B, K, n, m] of rows of queries [B, K, n, d]."""
    return how.map(q.to(given.kind), given.tables)


def values_of(how: Summing, given: Given) -> torch.Tensor:
    """Rows of values [B, K, n, e]: behind each a 1, whose sum is that of the weights."""
    v = given.v.to(given.kind)
    return pad(v, (0, 1), value=1.0) if how.quotient.divides else v


def chunked(x: torch.Tensor, count: int) -> torch.Tensor:
    """[B, K, n, m] as [N, count, n / count, m]."""
    return x.reshape(x.shape[:2].numel(), count, -1, x.shape[-1])


def absorb(how: Summing, given: Given, state: State) -> State:
    """The sums of a state and of some keys."""
    found = features_of_keys(how, given)
    frames = frames_of(given, found.log, state.base, found.values.shape[2])
    g, w = chunked(found.values, 1), chunked(values_of(how, given), 1)
    if frames is None:
        more = (g.transpose(-1, -2) @ w)[:, 0]
        return State(more if state.sums is None else state.sums + more)
    more = (g.transpose(-1, -2) @ frames.staying(w))[:, 0]
    if state.sums is not None:
        more = more + state.sums * frames.fades(w.dtype)[:, 0]
    return State(more, frames.end)


def read(
    how: Summing, given: Given, state: State, finish: Finish
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What queries [B, K, R, n, d] make of the sums over all keys: rows [B, K, R, n, e] and
    numbers [B, K, R, n]."""
    found = features_of_queries(how, given.q.flatten(2, 3), given)
    log = None if found.log is None else found.log.detach().flatten(0, 1)
    if state.base is not None and given.gate is None:
        base = state.base[:, None].to(given.kind)
        log = base if log is None else log + base
    total = no_sums(how, given) if state.sums is None else state.sums
    out, numbers = finish(found.values.flatten(0, 1) @ total, log)
    if numbers is not None:
        numbers = numbers.expand(out.shape[:-1]).view(given.q.shape[:-1])
    return out.view(*given.q.shape[:-1], out.shape[-1]), numbers


def read_causal(
    how: Summing, given: Given, state: State, finish: Finish
) -> tuple[torch.Tensor, torch.Tensor | None, State]:
    """The same of queries that read the keys at their positions and before, on top of a state, and
    the state after them."""
    batch, heads, repeat, n, _ = given.q.shape
    chunk = how.chunk if n % how.chunk == 0 else n
    count = n // chunk
    keys = features_of_keys(how, given)
    g, w = chunked(keys.values, count), chunked(values_of(how, given), count)
    frames = frames_of(given, keys.log, state.base, chunk)
    q = given.q
    if repeat > 1:
        # the queries of all heads of a chunk beside each other
        q = torch.unflatten(q, 3, (count, chunk)).transpose(2, 3).flatten(3, 4)
    queries = features_of_queries(how, q.flatten(2, -2), given)
    f = chunked(queries.values, count)
    before = no_sums(how, given) if state.sums is None else state.sums
    fresh = not (given.q.is_cpu and unseen(before, *given.tensors))
    states, after = states_of(before, g, w, frames, fresh)
    pairs = _pairs(how, given, (q.flatten(2, -2), f, g), count)
    y = (pairs * _weights(how, given, frames, chunk)) @ w
    y = y + (f @ states if frames is None else frames.entering(f @ states))
    log = None if queries.log is None else queries.log.detach().reshape(y.shape[:-1])
    if frames is not None and given.gate is None:
        # sums of a gate are the ones that are meant, since what it forgets is gone
        rows = (frames.start[..., None] + frames.rows).repeat(1, 1, repeat).to(given.kind)
        log = rows if log is None else log + rows
    out, numbers = finish(y, log)

    def ordered(x: torch.Tensor) -> torch.Tensor:
        x = x.view(batch, heads, count, repeat, chunk, -1)
        return x.transpose(2, 3).flatten(3, 4)

    if numbers is not None:
        numbers = ordered(numbers[..., None])[..., 0]
    return ordered(out), numbers, State(after, None if frames is None else frames.end)


def _pairs(
    how: Summing, given: Given, rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor], count: int
) -> torch.Tensor:
    """The products [N, S, R c, c] of features in a chunk."""
    q, f, g = rows
    if how.paired is None:
        return f @ g.transpose(-1, -2)
    k = given.k.to(given.kind)
    if given.padding is not None:
        k = k.masked_fill(~given.padding[:, None, :, None], 0.0)
    return how.paired.pairs(chunked(q.to(given.kind), count), chunked(k, count))


def _weights(how: Summing, given: Given, frames: Frames | None, c: int) -> torch.Tensor:
    """exp(t_j - r_i) of the pairs of a chunk, 0 where j > i: [N, S, R c, c], or [R c, c]."""
    repeat = given.q.shape[2]
    later = torch.ones(c, c, dtype=torch.bool, device=given.q.device).triu(1)
    if frames is None:
        weights = (~later).to(given.kind).repeat(repeat, 1)
    else:
        pairs = frames.keys[..., None, :] - frames.rows[..., None]
        weights = torch.exp(pairs.masked_fill(later, -torch.inf).to(given.kind))
        weights = weights if repeat == 1 else weights.repeat(1, 1, repeat, 1)
    if given.padding is None or how.paired is None:
        # features of padding are 0
        return weights
    real = given.padding[:, None].expand(-1, given.k.shape[1], -1)
    return weights * real.reshape(given.k.shape[:2].numel(), -1, 1, c)


# --- all of them ---------------------------------------------------------------------------------


def absorbed(how: Summing, given: Given, state: State) -> State:
    """The sums [N, m, e] of a state and of all keys."""
    every, found = replace(how, causal=False), []
    for part, mine in _parts(how, given, state):
        for some in blocks_of(every, part)[0]:
            mine = _run(how, some, mine)[2]
        found.append(mine)
    return _whole(how, given, found)


def summed(
    how: Summing, given: Given, state: State, finish: Finish
) -> tuple[torch.Tensor, torch.Tensor | None, State]:
    """What `finish` makes of the sums of all queries on top of a state, rows [B, K, R, n_q, e] and
    numbers [B, K, R, n_q], and the state after all keys."""
    parts, into = _parts(how, given, state), list[torch.Tensor]()
    wholes, logs, states = list[torch.Tensor](), list[torch.Tensor](), list[State]()
    for number, (part, mine) in enumerate(parts):
        before, rows = blocks_of(how, part)
        for some in before:
            mine = _run(how, some, mine)[2]
        outs, numbers = list[torch.Tensor](), list[torch.Tensor]()
        for some in rows or [part]:
            out, log, mine = _run(how, some, mine, finish)
            outs.append(out)
            numbers += [] if log is None else [log]
        if number == 0 and len(parts) > 1 and unseen(*given.tensors):
            # written where it belongs rather than put together twice
            whole = outs[0].new_empty(*given.q.shape[:4], outs[0].shape[-1])
            into = cut(whole, room_of(how, given))
        wholes.append(torch.cat(outs, 3, out=into[number]) if into else _in_order(outs))
        logs += [_in_order(numbers)] if numbers else []
        states.append(mine)
    heads = given.k.shape[1]
    out = whole if into else joined(wholes, heads)
    return out, joined(logs, heads) if logs else None, _whole(how, given, states)


def _in_order(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Blocks [B, K, R, n, …] one after the other."""
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, 3)


def _parts(how: Summing, given: Given, state: State) -> list[tuple[Given, State]]:
    """What is computed at once, with the states of its heads."""
    room = room_of(how, given)
    parts = shares(given, room)
    of_parts = [
        [None] * len(parts)
        if x is None
        else [y.flatten(0, 1) for y in cut(torch.unflatten(x, 0, given.k.shape[:2]), room)]
        for x in (state.sums, state.base)
    ]
    return [(part, State(*each)) for part, *each in zip(parts, *of_parts, strict=True)]


def _whole(how: Summing, given: Given, states: Sequence[State]) -> State:
    """The states of all parts as one."""
    if len(states) == 1:
        return states[0]
    room = room_of(how, given)
    shapes = [x.shape[:2] for x in cut(given.k, room)]

    def of(each: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        rows = [
            torch.unflatten(x, 0, shape)
            for x, shape in zip(each, shapes, strict=True)
            if x is not None
        ]
        return joined(rows, given.k.shape[1]).flatten(0, 1) if rows else None

    return State(of([x.sums for x in states]), of([x.base for x in states]))


def _run(
    how: Summing, given: Given, state: State, finish: Finish | None = None
) -> tuple[Any, torch.Tensor | None, State]:
    """What `finish` makes of the sums of a block, and the state after it; without it the block has
    no queries. A block of many features is computed again for its derivatives."""

    def run(given: Given, state: State) -> tuple[torch.Tensor | None, ...]:
        out = log = None
        if finish is None:
            state = absorb(how, given, state)
        elif how.causal and given.q.shape[3]:
            out, log, state = read_causal(how, given, state, finish)
        else:
            out, log = read(how, given, state, finish)
        return out, log, state.sums, state.base

    base = state.base
    extra = () if state.sums is None else (state.sums,)

    def of(given: Given, *sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return run(given, State(sums[0] if sums else None, base))

    out, log, sums, base_after = lean(how, given, of, *extra)
    return out, log, State(sums, None if base_after is None else base_after.detach())


def lean(
    how: Summing | None, given: Given, run: Callable[..., tuple[Any, ...]], *more: torch.Tensor
) -> tuple[Any, ...]:
    """What `run` makes of what is given and of more tensors; where features are many, or `how` is
    None, nothing is kept for derivatives but these, and it runs again."""
    tensors, size = (*given.tensors, *more), max(given.q.shape[-1], given.v.shape[-1])
    if is_transformed() or unseen(*tensors):
        return run(given, *more)
    frame, count = given.frame, len(given.tensors)
    wide = how is None or how.map.width(given.q.shape[-1]) > WIDE * size

    def again(*tensors: torch.Tensor) -> tuple[Any, ...]:
        return run(given_of(frame, tensors[:count]), *tensors[count:])

    found: tuple[Any, ...] = Again.apply(again, not wide, *tensors)  # type: ignore[no-untyped-call]
    return found


class Again(Function):
    """A function of tensors, of which nothing outlives its first derivatives but these; `keep` says
    whether what it made of them is kept until then, or made again."""

    @staticmethod
    def forward(ctx, run, keep, *tensors):  # type: ignore[no-untyped-def]
        ctx.run, ctx.kept = run, None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        if not keep:
            return run(*tensors)
        ctx.kept = _followed(run, tensors, ctx.needs_input_grad[2:])
        return tuple(x if x is None else x.detach() for x in ctx.kept[1])

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        parts, asks, run = ctx.saved_tensors, ctx.needs_input_grad[2:], ctx.run
        if torch.is_grad_enabled():
            return None, None, *derivatives(run, parts, asks, grads)
        (leaves, outs), ctx.kept = ctx.kept or _followed(run, parts, asks), None
        pairs = [
            (x, y) for x, y in zip(outs, grads, strict=True) if y is not None and x.requires_grad
        ]
        if not pairs:
            return None, None, *(None for _ in asks)
        wanted = [x for x in leaves if x.requires_grad]
        outs, above = zip(*pairs, strict=True)
        shares = iter(torch.autograd.grad(outs, wanted, above, allow_unused=True))
        return None, None, *(next(shares) if ask else None for ask in asks)


def _followed(
    run: Callable[..., tuple[Any, ...]], tensors: Sequence[torch.Tensor], asks: Sequence[bool]
) -> tuple[list[torch.Tensor], tuple[Any, ...]]:
    """Leaves like tensors that ask for gradients, and what is made of them, for autograd."""
    leaves = [x.detach().requires_grad_(ask) for x, ask in zip(tensors, asks, strict=True)]
    with torch.enable_grad():
        return leaves, run(*leaves)
