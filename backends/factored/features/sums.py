"""Attention as sums of features, block by block, in operations that differentiate to any order.

out_i = sum_j (f(q_i) . g(k_j)) v_j / sum_j f(q_i) . g(k_j), over all keys or those with j <= i.
Causal sums go by chunks: what a query reads of its own chunk is a dense product, all before it
comes through a state.

    y_i = sum over j <= i of exp(t_j - r_i) (f_i . g_j) w_j

for features f of queries and g of keys, rows w of values, behind each of them a 1, and frames t, r.
Some chunks make a block, whose chunks are computed at once: f [B, K, S, R c, m], g [B, K, S, c, m]
and w [B, K, S, c, e] for B samples, K key heads, S chunks of c positions and the R query heads of a
key head as more rows. A state [B, K, m, e] holds the sums over all keys before a block, in the
frame of the last of them. The weight of a key depends on no later key, bit by bit: a frame r_i is a
maximum over j <= i. Autograd keeps the features of a block where they are few; else it computes the
block again, so that memory stays that of some tensors like q.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnspec.backends.common.merging import LOWEST
from attnspec.backends.common.torch_modes import Function, derivatives, is_transformed, unseen
from attnspec.backends.factored.features.maps import FeatureMap, Features, Tables
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.backends.tables.blocks import scratch
from attnspec.ir.mechanisms.declaration import WIDE
from attnspec.limits import LIMITS

Sums: TypeAlias = "tuple[Tensor, Tensor, Tensor | None]"
"""What sums are worth [B, K, R, n_q, d_v], the sums of their weights [B, K, R, n_q] and the frames
of these [B, K, R, n_q], constants, if there are any."""

Frame: TypeAlias = "tuple[Tensor | None, int, tuple[str, ...]]"
"""Padding, the number of frames of a gate, and the names of the tables."""


@dataclass(frozen=True)
class Given:
    """What is summed: q [B, K, R, n_q, d], k [B, K, n_k, d], v [B, K, n_k, d_v], `padding` bool
    [B, n_k] or None, and, of a gate, frames of keys and rows [B, K, n_k] in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    padding: Tensor | None
    gate: tuple[Tensor, ...]
    tables: Tables

    @property
    def kind(self) -> torch.dtype:
        """The type of sums."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that may be differentiated."""
        return self.q, self.k, self.v, *self.gate, *self.tables.values()

    @property
    def frame(self) -> Frame:
        """All else, for `given_of`."""
        return self.padding, len(self.gate), tuple(self.tables)

    def gradients(self) -> Given:
        """Tensors to fill with the gradients of q, k and v, and to add those of others to."""
        rows = (x.new_empty(x.shape) for x in self.tensors[:3])
        return given_of(self.frame, (*rows, *(torch.zeros_like(x) for x in self.tensors[3:])))

    def keys(self, sizes: list[int]) -> list[Given]:
        """The keys in blocks of these sizes, without queries."""
        real: Sequence[Tensor | None] = [None] * len(sizes)
        if self.padding is not None:
            real = torch.split(self.padding, sizes, 1)
        k, v, *gate = (torch.split(x, sizes, 2) for x in (self.k, self.v, *self.gate))
        gates = zip(*gate, strict=True) if gate else [()] * len(sizes)
        none = self.q[:, :, :, :0]
        return [Given(none, *x, self.tables) for x in zip(k, v, real, gates, strict=True)]


def given_of(frame: Frame, tensors: Sequence[Tensor]) -> Given:
    """What these tensors are, as `Given.tensors` has them."""
    (padding, gates, names), (q, k, v, *rest) = frame, tensors
    tables = dict(zip(names, rest[gates:], strict=True))
    return Given(q, k, v, padding, tuple(rest[:gates]), tables)


@dataclass(frozen=True)
class Summing:
    """How features are summed; `chunk` positions are computed pair by pair, and temporaries have
    about `block` numbers."""

    map: FeatureMap
    causal: bool
    quotient: Quotient
    chunk: int = LIMITS.feature_chunk
    block: int = LIMITS.piece

    def wide(self, given: Given) -> bool:
        """Whether features are so many that a backward pass computes them again."""
        size = given.q.shape[-1]
        return self.map.width(size) > WIDE * max(size, given.v.shape[-1])

    def most(self, given: Given) -> int:
        """How many positions of a single key head make a block."""
        size = given.q.shape[-1]
        wide = max(size, given.v.shape[-1], self.map.width(size)) * given.q.shape[2]
        return self.block // max(1, wide)


# --- parts ---------------------------------------------------------------------------------------


def room_of(how: Summing, given: Given) -> tuple[int, int]:
    """How many samples and key heads fit a block with all their positions. Long sequences go head
    by head, so that many positions make a block."""
    together = max(1, how.most(given) // max(1, given.k.shape[2]))
    return max(1, together // max(1, given.k.shape[1])), together


def cut(x: Tensor, room: tuple[int, int]) -> list[Tensor]:
    """[B, K, …] in parts of so many samples and heads, whose gradients are put together again."""
    return [part for some in torch.split(x, room[0]) for part in torch.split(some, room[1], 1)]


def shares(given: Given, room: tuple[int, int]) -> Iterator[Given]:
    """What is given to each of these parts."""
    columns = max(1, -(-given.k.shape[1] // room[1]))
    rows = zip(*(cut(x, room) for x in (given.q, given.k, given.v, *given.gate)), strict=True)
    tables = {
        name: [x] * columns if len(x) == 1 else torch.split(x, room[1])
        for name, x in given.tables.items()
    }
    for number, (q, k, v, *gate) in enumerate(rows):
        row, column = divmod(number, columns)
        real = given.padding
        if real is not None:
            real = real[row * room[0] : (row + 1) * room[0]]
        mine = {name: parts[column] for name, parts in tables.items()}
        yield Given(q, k, v, real, tuple(gate), mine)


def joined(parts: Sequence[Tensor], heads: int) -> Tensor:
    """The parts [B', K', …] of all samples and so many heads, as `cut` has them, in one tensor."""
    columns = max(1, -(-heads // max(1, parts[0].shape[1])))
    rows = [in_line(parts[at : at + columns], 1) for at in range(0, len(parts), columns)]
    return in_line(rows, 0)


def in_line(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Tensors one after the other along an axis."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)


def blocks_of(how: Summing, given: Given) -> tuple[list[Given], list[Given]]:
    """Blocks of keys that are summed before any query is examined, without queries; and blocks of
    queries, with the keys at their positions where sums are causal, else with all."""
    n_q, n_k = given.q.shape[3], given.k.shape[2]
    most = max(1, how.most(given) // max(1, given.k.shape[:2].numel()))
    if not how.causal:
        rows = torch.split(given.q, _sizes(n_q, most) or [0], 3)
        return given.keys(_sizes(n_k, most)), [replace(given, q=q) for q in rows]
    before, whole = _sizes(n_k - n_q, most), n_q // how.chunk * how.chunk
    sizes = _sizes(whole, max(how.chunk, most // how.chunk * how.chunk))
    sizes += [n_q - whole] if n_q > whole or not n_q else []
    keys, rows = given.keys([*before, *sizes]), torch.split(given.q, sizes, 3)
    behind = [replace(x, q=q) for x, q in zip(keys[len(before) :], rows, strict=True)]
    return keys[: len(before)], behind


def _sizes(count: int, step: int) -> list[int]:
    """So many positions in steps, the last of which may be shorter."""
    return [min(step, count - at) for at in range(0, count, step)]


# --- states and frames ---------------------------------------------------------------------------


@dataclass(frozen=True)
class State:
    """The sums over some keys [B, K, m, e] in the frame `base` [B, K], None for 0."""

    sums: Tensor
    base: Tensor | None = None


def no_keys(how: Summing, given: Given) -> State:
    """The sums over no key."""
    shape = how.map.width(given.k.shape[-1]), given.v.shape[-1] + how.quotient.divides
    return State(given.k.new_zeros(*given.k.shape[:2], *shape, dtype=given.kind))


@dataclass(frozen=True)
class Frames:
    """t [B, K, S, c] and r [B, K, S, c] of a block, r not falling and t_j <= r_i for all j <= i,
    counted from the states `start` [B, K, S] before each chunk; `end` [B, K] is that of the state
    after all.

    Their type may be wider than that of the sums: differences are rounded, not what they are of.
    """

    keys: Tensor
    rows: Tensor
    start: Tensor
    end: Tensor

    def entering(self, f: Tensor) -> Tensor:
        """Rows [B, K, S, R c, …] brought to the frame of the state before their chunk."""
        factor = torch.exp((-self.rows).to(f.dtype))
        return f * factor.repeat(1, 1, 1, f.shape[3] // factor.shape[3])[..., None]

    def staying(self, w: Tensor) -> Tensor:
        """Rows [B, K, S, c, e] as the state after their chunk has them."""
        return w * torch.exp((self.keys - self.rows[..., -1:].detach()).to(w.dtype))[..., None]

    def fades(self, kind: torch.dtype) -> Tensor:
        """What the state before a chunk is multiplied with in the one after it [B, K, S, 1, 1]."""
        return torch.exp((-self.rows[..., -1].detach()).to(kind))[..., None, None]


def frames_of(given: Given, log: Tensor | None, base: Tensor | None, chunk: int) -> Frames | None:
    """The frames of a block of keys with frames `log` [B, K, n], or those of a gate, whose first
    state is in the frame `base` [B, K]."""
    if given.gate:
        keys, rows = (torch.unflatten(x, 2, (-1, chunk)) for x in given.gate)
        first = torch.zeros_like(rows[:, :, 0, 0].detach()) if base is None else base
    elif log is None:
        return None
    else:
        keys = torch.unflatten(log.detach(), 2, (-1, chunk))
        base = keys.new_full(keys.shape[:2], LOWEST) if base is None else base
        rows = torch.cummax(torch.cat([base[..., None], keys.flatten(2)], 2), 2).values[..., 1:]
        # a state that holds nothing has the frame of the first key, which no later one changes
        first = rows.masked_fill(rows <= LOWEST, torch.inf).amin(2)
        first = torch.where(base > LOWEST, base, torch.where(first < torch.inf, first, 0.0))
        rows = torch.maximum(rows, first[..., None]).view(keys.shape)
    # whatever frames states have, they are constants
    start = torch.cat([first[..., None], rows[:, :, :-1, -1].detach()], 2)
    end = rows[:, :, -1, -1].detach()
    return Frames(keys - start[..., None], rows - start[..., None], start, end)


def states_of(
    state: Tensor, g: Tensor, w: Tensor, frames: Frames | None, fresh: bool
) -> tuple[Tensor, Tensor]:
    """The states before each chunk [B, K, S, m, e], where `state` is the first, and the one after
    the last. Where they need not be `fresh` they lie in a buffer that the next block overwrites."""
    count, fades = g.shape[2], None
    if frames is not None:
        w, fades = frames.staying(w), frames.fades(w.dtype).unbind(2)
    if count > 1 and not fresh:
        into = scratch("states", (*g.shape[:2], count + 1, *state.shape[2:]), g.dtype)
        into[:, :, 0] = state
        torch.matmul(g.mT, w, out=into[:, :, 1:])
        states = into.unbind(2)
        for at in range(count):
            if fades is None:
                states[at + 1].add_(states[at])
            else:
                states[at + 1].addcmul_(states[at], fades[at])
        return into[:, :, :-1], states[-1].clone()
    found = [state]
    for at, part in enumerate((g.mT @ w).unbind(2)):
        found.append((found[-1] if fades is None else found[-1] * fades[at]) + part)
    return torch.stack(found[:-1], 2), found[-1]


# --- blocks --------------------------------------------------------------------------------------


def features_of_keys(how: Summing, given: Given) -> Features:
    """The features [B, K, n, m] of keys, none of padding."""
    values, log = how.map(given.k.to(given.kind), given.tables)
    if given.padding is None:
        return values, log
    real = given.padding[:, None]
    log = None if log is None else log.masked_fill(~real, -torch.inf)
    return values.masked_fill(~real[..., None], 0.0), log


def values_of(how: Summing, given: Given) -> Tensor:
    """Rows of values [B, K, n, e]: behind each a 1, whose sum is that of the weights."""
    v = given.v.to(given.kind)
    return pad(v, (0, 1), value=1.0) if how.quotient.divides else v


def absorb(how: Summing, given: Given, state: State) -> tuple[tuple[()], State]:
    """Nothing of queries, and the sums of a state and of some keys."""
    g, log = features_of_keys(how, given)
    frames, w = frames_of(given, log, state.base, g.shape[2]), values_of(how, given)
    if frames is None:
        return (), State(state.sums + g.mT @ w)
    more = g.mT @ frames.staying(w[:, :, None])[:, :, 0]
    return (), State(more + state.sums * frames.fades(w.dtype)[:, :, 0], frames.end)


def worth(how: Summing, sums: Tensor, log: Tensor | None) -> list[Tensor]:
    """What sums [..., e] are worth, of which exp(log) times as much is meant, the sums of their
    weights, and log if there is one."""
    total = sums[..., -1] if how.quotient.divides else torch.zeros_like(sums[..., 0])
    return [how.quotient.of(sums, log), total, *([] if log is None else [log])]


def read(how: Summing, given: Given, state: State) -> tuple[Tensor, ...]:
    """What queries [B, K, R, n, d] make of the sums over all keys."""
    f, log = how.map(given.q.to(given.kind).flatten(2, 3), given.tables)
    log = None if log is None else log.detach()
    if state.base is not None and not given.gate:
        base = state.base[..., None].to(given.kind)
        log = base if log is None else log + base
    output = worth(how, f @ state.sums, log)
    return tuple(torch.unflatten(x, 2, given.q.shape[2:4]) for x in output)


def read_causal(how: Summing, given: Given, state: State) -> tuple[tuple[Tensor, ...], State]:
    """The same of queries that read the keys at their positions and before, on top of a state, and
    the state after them."""
    repeat, n = given.q.shape[2:4]
    chunk = how.chunk if n % how.chunk == 0 else n
    count = n // chunk

    def chunked(x: Tensor) -> Tensor:
        return torch.unflatten(x, 2, (count, -1))

    keys, log = features_of_keys(how, given)
    g, w = chunked(keys), chunked(values_of(how, given))
    frames = frames_of(given, log, state.base, chunk)
    # the queries of all heads of a chunk beside each other
    q = torch.unflatten(given.q, 3, (count, chunk)).transpose(2, 3).flatten(2, 4)
    queries, log = how.map(q.to(given.kind), given.tables)
    f = chunked(queries)
    fresh = not (given.q.is_cpu and unseen(state.sums, *given.tensors))
    states, after = states_of(state.sums, g, w, frames, fresh)
    if how.map.paired:
        k = given.k.to(given.kind)
        if given.padding is not None:
            k = k.masked_fill(~given.padding[:, None, :, None], 0.0)
        pairs = how.map.pairs(chunked(q.to(given.kind)), chunked(k))
    else:
        pairs = f @ g.mT
    y = (pairs * _weights(how, given, frames, chunk)) @ w
    y = y + (f @ states if frames is None else frames.entering(f @ states))
    log = None if log is None else chunked(log.detach())
    if frames is not None and not given.gate:
        # sums of a gate are the ones that are meant, since what it forgets is gone
        rows = (frames.start[..., None] + frames.rows).repeat(1, 1, 1, repeat).to(given.kind)
        log = rows if log is None else log + rows
    outs = (torch.unflatten(x, 3, (repeat, chunk)).transpose(2, 3) for x in worth(how, y, log))
    out = tuple(x.flatten(3, 4) for x in outs)
    return out, State(after, None if frames is None else frames.end)


def _weights(how: Summing, given: Given, frames: Frames | None, c: int) -> Tensor:
    """exp(t_j - r_i) of the pairs of a chunk, 0 where j > i: [B, K, S, R c, c], or [R c, c]."""
    repeat = given.q.shape[2]
    later = torch.ones(c, c, dtype=torch.bool, device=given.q.device).triu(1)
    if frames is None:
        weights = (~later).to(given.kind).repeat(repeat, 1)
    else:
        pairs = frames.keys[..., None, :] - frames.rows[..., None]
        weights = torch.exp(pairs.masked_fill(later, -torch.inf).to(given.kind))
        weights = weights if repeat == 1 else weights.repeat(1, 1, 1, repeat, 1)
    if given.padding is None or not how.map.paired:
        # features of padding are 0
        return weights
    return weights * torch.unflatten(given.padding, 1, (-1, 1, c))[:, None]


# --- all of them ---------------------------------------------------------------------------------


def absorbed(how: Summing, given: Given, state: State) -> State:
    """The sums of a state and of all keys."""
    keys = replace(given, q=given.q[:, :, :, :0])
    return summed(replace(how, causal=False), keys, state)[1]


def summed(how: Summing, given: Given, state: State) -> tuple[Sums, State]:
    """The sums of all queries on top of a state, and the state after all keys."""
    room, heads = room_of(how, given), given.k.shape[1]
    parts, sums, into = list(shares(given, room)), cut(state.sums, room), list[list[Tensor]]()
    bases = [None] * len(parts) if state.base is None else cut(state.base, room)
    outs, wholes, states = list[list[Tensor]](), list[Tensor](), list[State]()
    for number, (part, mine) in enumerate(zip(parts, map(State, sums, bases), strict=True)):
        before, blocks = blocks_of(how, part)
        found = []
        for block in before:
            mine = _run(how, block, mine, False)[1]
        for block in blocks:
            rows, mine = _run(how, block, mine, True)
            found.append(rows)
        columns = list(zip(*found, strict=True))
        if number == 0 and len(parts) > 1 and unseen(*given.tensors):
            # written where it belongs rather than put together twice
            wholes = [x[0].new_empty(*given.q.shape[:4], *x[0].shape[4:]) for x in columns]
            into = [cut(x, room) for x in wholes]
        for x, its in zip(columns, into, strict=False):
            torch.cat(x, 3, out=its[number])
        if not into:
            outs.append([in_line(x, 3) for x in columns])
        states.append(mine)
    out, total, *log = wholes or [joined(x, heads) for x in zip(*outs, strict=True)]
    ends = [x.base for x in states if x.base is not None]
    after = State(joined([x.sums for x in states], heads), joined(ends, heads) if ends else None)
    return (out, total, log[0].detach() if log else None), after


def _run(how: Summing, given: Given, state: State, reads: bool) -> tuple[tuple[Tensor, ...], State]:
    """The sums of a block, of which queries are read or not, and the state after it. A block of
    many features is computed again for its derivatives."""
    base, again = state.base, how.wide(given)
    if reads and not (how.causal and given.q.shape[3]):
        return lean(again, given, lambda x, y: read(how, x, State(y, base)), state.sums), state

    def run(given: Given, sums: Tensor) -> tuple[Tensor | None, ...]:
        step = read_causal if reads else absorb
        rows, after = step(how, given, State(sums, base))
        return *rows, after.sums, after.base

    *outs, sums, after = lean(again, given, run, state.sums)
    return tuple(outs), State(sums, None if after is None else after.detach())


def lean(
    again: bool, given: Given, run: Callable[..., tuple[Any, ...]], *more: Tensor
) -> tuple[Any, ...]:
    """What `run` makes of what is given and of more tensors, of which nothing outlives the first
    derivatives; `again` nothing else is kept for them, and it runs once more."""
    tensors = *given.tensors, *more
    if is_transformed() or unseen(*tensors):
        return run(given, *more)
    frame, count = given.frame, len(given.tensors)

    def made(*tensors: Tensor) -> tuple[Any, ...]:
        return run(given_of(frame, tensors[:count]), *tensors[count:])

    def outputs(*tensors: Tensor) -> tuple[Any, ...]:
        if again:
            return made(*tensors), (), []
        leaves, outs = _followed(made, tensors)
        return tuple(x if x is None else x.detach() for x in outs), (), [(leaves, outs)]

    def gradients(tensors: Any, _: Any, kept: list[Any], grads: Any) -> Sequence[Any]:
        leaves, found = kept.pop() if kept else _followed(made, tensors)
        pairs = [
            (x, y) for x, y in zip(found, grads, strict=True) if y is not None and x.requires_grad
        ]
        if not pairs:
            return [None] * len(leaves)
        wanted = [x for x in leaves if x.requires_grad]
        outs, above = zip(*pairs, strict=True)
        shares = iter(torch.autograd.grad(outs, wanted, above, allow_unused=True))
        return [next(shares) if x.requires_grad else None for x in leaves]

    result: tuple[Any, ...] = Derived.apply(made, outputs, gradients, *tensors)  # type: ignore[no-untyped-call]
    return result


def _followed(
    run: Callable[..., tuple[Any, ...]], tensors: Sequence[Tensor]
) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Leaves like tensors, and what is made of them, for autograd."""
    leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
    with torch.enable_grad():
        return leaves, run(*leaves)


class Derived(Function):
    """What `outputs` makes of tensors, beside tensors to save and what else it keeps, and of these
    and the gradients of outputs those of the tensors, which `gradients` makes; for derivatives of
    derivatives `run` makes the same outputs in operations that autograd follows."""

    @staticmethod
    def forward(ctx, run, outputs, gradients, *tensors):  # type: ignore[no-untyped-def]
        outs, saved, ctx.kept = outputs(*tensors)
        ctx.run, ctx.gradients, ctx.count = run, gradients, len(tensors)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        return outs

    @staticmethod
    def backward(ctx, *grads):  # type: ignore[no-untyped-def]
        every = ctx.saved_tensors
        tensors, saved = every[: ctx.count], every[ctx.count :]
        if torch.is_grad_enabled():
            asks = ctx.needs_input_grad[3:]
            return None, None, None, *derivatives(ctx.run, tensors, asks, grads)
        return None, None, None, *ctx.gradients(tensors, saved, ctx.kept, grads)
