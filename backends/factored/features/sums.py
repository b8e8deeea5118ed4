"""Attention as sums of features, block by block, in operations that differentiate to any order.

out_i = sum_j (f(q_i) . g(k_j)) v_j / sum_j f(q_i) . g(k_j), over all keys or those with j <= i.
Causal sums go by chunks: what a query reads of its own chunk is a dense product, all before it
comes through a state.

    y_i = sum over j <= i of exp(t_j - r_i) (f_i . g_j) w_j

for features f of queries and g of keys, rows w of values, behind each of them a 1, and frames t, r.
Some chunks make a block, whose chunks are computed at once: f [N, S, R c, m], g [N, S, c, m] and
w [N, S, c, e] for N key heads, those of all samples, S chunks of c positions and the R query heads
of a key head as more rows. A state [N, e, m] holds the sums over all keys before a block, in the
frame of the last of them. The weight of a key depends on no later key, bit by bit: a frame r_i is a
maximum over j <= i. Autograd keeps the features of a block where they are few; else it computes the
block again, so that memory stays that of some tensors like q.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from attnspec.backends.common.merging import LOWEST, Outputs, joined, wide_type
from attnspec.backends.common.torch_modes import (
    Function,
    derivatives,
    gradients_of,
    is_transformed,
    unseen,
)
from attnspec.backends.factored.features.maps import Features, Summing, Tables
from attnspec.ir.mechanisms.declaration import WIDE
from attnspec.limits import LIMITS

Weighed: TypeAlias = tuple[Tensor, Tensor]
"""Sums of values by their weights [N, R, n_q, e], that of the weights last where they are divided,
which stand for exp(log) times as much, log [N, R, n_q], a constant."""

Frames: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor]"
"""t [N, S, c] and r [N, S, c] of a block, r not falling and t_j <= r_i for all j <= i, counted from
the states [N, S] before each chunk, which come next; and the frame [N] of the state after all.
Their type may be wider than that of the sums: differences are rounded, not what they are of."""


class State(NamedTuple):
    """The sums over some keys [N, e, m] in the frame `base` [N]; None for sums of other kinds."""

    sums: Tensor
    base: Tensor | None = None


class Given(NamedTuple):
    """What is summed: q [N, R, n_q, d], k [N, n_k, d], v [N, n_k, d_v], `padding` bool [N, n_k] or
    None, of a gate frames of keys and rows [N, n_k] in float64, and tables [N, ...]; and how."""

    q: Tensor
    k: Tensor
    v: Tensor
    padding: Tensor | None
    gate: tuple[Tensor, ...]
    tables: Tables
    how: Summing

    @property
    def kind(self) -> torch.dtype:
        """The type of sums."""
        return wide_type(self.q)

    @property
    def is_wide(self) -> bool:
        """Whether features are so many that a backward pass computes them again."""
        size = self.q.shape[-1]
        return self.how.width(size) > WIDE * max(size, self.v.shape[-1])

    # --- parts ---------------------------------------------------------------------------------

    def most(self, block: int) -> int:
        """How many positions of a single key head make a block of so many numbers."""
        size = self.q.shape[-1]
        wide = max(size, self.v.shape[-1], self.how.width(size)) * self.q.shape[1]
        return block // max(1, wide)

    def parts(self, *more: Any, block: int | None = None) -> list[Any]:
        """This and more tensors [N, ...], for as many key heads at a time as fit a block with all
        their positions. Long sequences go head by head, so that many positions make a block."""
        room = max(1, self.most(block or LIMITS.piece) // max(1, self.k.shape[1]))
        leaves, tree = tree_flatten((self, *more))
        some = (torch.split(x, room) if isinstance(x, Tensor) else repeat(x) for x in leaves)
        return [tree_unflatten(each, tree) for each in zip(*some, strict=False)]

    def cut(self, queries: list[int], keys: list[int]) -> list[Given]:
        """So many queries and keys at a time."""
        rows = torch.split(self.q, queries, 2)
        sides = {"k": self.k, "v": self.v, "padding": self.padding, "gate": self.gate}
        leaves, tree = tree_flatten(sides)
        some = (repeat(None) if x is None else torch.split(x, keys, 1) for x in leaves)
        each: Any = zip(rows, *some, strict=False)
        return [self._replace(q=q, **tree_unflatten(x, tree)) for q, *x in each]

    def blocks(self) -> list[Given]:
        """Blocks of keys that are summed before any query is examined, without queries; and blocks
        of queries, with the keys at their positions where sums are causal, else without any."""
        n_q, n_k, chunk = self.q.shape[2], self.k.shape[1], self.how.chunk
        step = max(1, self.most(LIMITS.piece) // max(1, len(self.k)))
        if not self.how.work.causal:
            rows, keys = _sizes(n_q, step) or [0], _sizes(n_k, step)
            return self.cut([0] * len(keys) + rows, keys + [0] * len(rows))
        before, rest = _sizes(n_k - n_q, step), n_q % chunk
        behind = _sizes(n_q - rest, max(chunk, step // chunk * chunk))
        behind += [rest] if rest or not n_q else []
        return self.cut([0] * len(before) + behind, before + behind)

    # --- features, states and frames -----------------------------------------------------------

    def features_of_queries(self) -> Features:
        """The features [N, R n_q, m] of queries."""
        return self.how.features(self.q.to(self.kind).flatten(1, 2), self.tables)

    def features_of_keys(self) -> Features:
        """The features [N, n, m] of keys, none of padding."""
        values, log = self.how.features(self.k.to(self.kind), self.tables)
        if self.padding is None:
            return values, log
        log = log.masked_fill(~self.padding, -torch.inf)
        return values.masked_fill(~self.padding[..., None], 0.0), log

    def values(self) -> Tensor:
        """Rows of values [N, n, e], 0 for padding: behind each a 1, whose sum is the weights'."""
        v = pad(self.v.to(self.kind), (0, int(self.how.divides)), value=1.0)
        return v if self.padding is None else v.masked_fill(~self.padding[..., None], 0.0)

    def no_keys(self) -> State:
        """The sums over no key."""
        features = self.how.width(self.k.shape[-1])
        shape = len(self.k), self.v.shape[-1] + self.how.divides, features
        return State(self.k.new_zeros(shape, dtype=self.kind), self.no_frame())

    def no_frame(self) -> Tensor:
        """The frame [N] of sums over no key."""
        lowest = LOWEST if self.how.framed else 0.0
        return self.k.new_full(self.k.shape[:1], lowest, dtype=self.kind)

    def frames(self, log: Tensor, base: Tensor, chunk: int) -> Frames | None:
        """The frames of a block of keys with frames `log` [N, n], or those of a gate, whose first
        state is in the frame `base` [N]; None where all are 0."""
        if self.gate:
            keys, rows = (torch.unflatten(x, 1, (-1, chunk)) for x in self.gate)
            first = base.to(rows.dtype)
        elif not self.how.framed:
            return None
        else:
            keys = torch.unflatten(log, 1, (-1, chunk))
            rows = torch.cummax(torch.cat([base[:, None], keys.flatten(1)], 1), 1).values[:, 1:]
            # a state that holds nothing has the frame of the first key, which no later one changes
            first = rows.masked_fill(rows <= LOWEST, torch.inf).amin(1)
            first = torch.where(base > LOWEST, base, torch.where(first < torch.inf, first, 0.0))
            rows = torch.maximum(rows, first[:, None]).view(keys.shape)
        # whatever frames states have, they are constants
        start = torch.cat([first[:, None], rows[:, :-1, -1].detach()], 1)
        end = rows[:, -1, -1].detach()
        return keys - start[..., None], rows - start[..., None], start, end

    # --- sums ----------------------------------------------------------------------------------

    def on(self, state: State) -> Weighed:
        """What queries make of the sums over all keys."""
        f, log = self.features_of_queries()
        if not self.gate:
            log = log + cast(Tensor, state.base)[:, None].to(self.kind)
        sums, log = (torch.unflatten(x, 1, self.q.shape[1:3]) for x in (f @ state.sums.mT, log))
        return sums, log

    def step(self, state: State) -> tuple[Tensor | None, ...]:
        """The sums of the queries of a block on top of a state and their frames, if it has queries,
        and the state after its keys, if it has keys."""
        (ratio, n), kind, how = self.q.shape[1:3], self.kind, self.how
        if not self.k.shape[1]:
            return *self.on(state), None, None
        chunk = n if n % how.chunk else how.chunk
        if not n:
            chunk = self.k.shape[1]

        def chunked(x: Tensor) -> Tensor:
            return torch.unflatten(x, 1, (-1, chunk))

        keys, log = self.features_of_keys()
        g, w = chunked(keys), chunked(self.values())
        frames = self.frames(log, cast(Tensor, state.base), chunk)
        *states, after = states_of(state.sums, g, w, frames)
        end = state.base if frames is None else frames[3]
        if not n:
            return None, None, after, end
        # the queries of all heads of a chunk beside each other
        q = torch.unflatten(self.q.to(kind), 2, (-1, chunk)).transpose(1, 2).flatten(2, 3)
        queries, log = how.features(q.flatten(1, 2), self.tables)
        f = torch.unflatten(queries, 1, (-1, ratio * chunk))
        pairs = how.pairs(q, chunked(self.k.to(kind))) if how.paired else f @ g.mT
        before, log = f @ torch.stack(states, 1).mT, log.view(f.shape[:3])
        # exp(t_j - r_i) of the pairs of a chunk, 0 where j > i: [N, S, R c, c], or [R c, c]
        weights = torch.ones(chunk, chunk, dtype=kind, device=q.device).tril()
        if frames is not None:
            of_keys, of_rows, start, _ = frames
            weights = (of_keys[..., None, :] - of_rows[..., None]).masked_fill(
                weights == 0, -torch.inf
            )
            weights, rows = torch.exp(weights.to(kind)), of_rows.repeat(1, 1, ratio)
            before = before * torch.exp(-rows.to(kind))[..., None]
            if not self.gate:
                # sums of a gate are the ones that are meant, since what it forgets is gone
                log = log + (start[..., None] + rows).to(kind)
        weights = weights if ratio == 1 else torch.cat([weights] * ratio, -2)
        rows, pairs, values = (x.flatten(0, 1) for x in (before, pairs * weights, w))
        y = torch.baddbmm(rows, pairs, values).view(before.shape)

        def in_order(x: Tensor) -> Tensor:
            return torch.unflatten(x, 2, (ratio, chunk)).transpose(1, 2).flatten(2, 3)

        return in_order(y), in_order(log), after, end

    def summed(self, state: State | None = None) -> tuple[Weighed, State]:
        """The sums of all queries on top of a state, and the state after all keys."""
        state = state or self.no_keys()
        if self.gate:
            # the frames of a gate count from the state
            state = State(state.sums, self.no_frame())
        out, log, sums, base = uncast(partial(_by_parts, _summed), self, state)
        return (out, log.detach()), State(sums, base.detach())

    def worth(self) -> Outputs:
        """What the sums of all queries are worth, divided while they are in the cache."""
        return cast(Outputs, uncast(partial(_by_parts, _worth), self, self.no_keys()))


def _sizes(count: int, step: int) -> list[int]:
    """So many positions in steps, the last of which may be shorter."""
    return [min(step, count - at) for at in range(0, count, step)]


def states_of(state: Tensor, g: Tensor, w: Tensor, frames: Frames | None) -> list[Tensor]:
    """The states [N, e, m] before each chunk, where `state` is the first, and after the last."""
    fades: Any = repeat(None)
    if frames is not None:
        last = frames[1][..., -1:].detach()
        w = w * torch.exp((frames[0] - last).to(w.dtype))[..., None]
        fades = torch.exp(-last.to(w.dtype))[..., None].unbind(1)
    states = [state]
    for part, fade in zip((w.mT @ g).unbind(1), fades, strict=False):
        before = states[-1]
        states.append(part + before if fade is None else torch.addcmul(part, before, fade))
    return states


def _by_parts(run: Callable[..., Any], given: Given, state: State) -> tuple[Any, ...]:
    """What `run` makes of some key heads after the others."""
    outs = [run(*part) for part in given.parts(state)]
    return tuple(None if x[0] is None else joined(x, 0) for x in zip(*outs, strict=True))


def _summed(given: Given, state: State) -> tuple[Any, ...]:
    rows = list[Any]()
    run = partial(lean, Given.step) if given.is_wide else Given.step
    for block in given.blocks():
        sums, log, after, base = run(block, state)
        state = state if after is None else State(after, base)
        rows += [] if sums is None else [(sums, log)]
    return *(joined(x, 2) for x in zip(*rows, strict=True)), *state


def _worth(given: Given, state: State) -> Outputs:
    sums, log, *_ = _summed(given, state)
    return given.how.worth((sums, log.detach()))


# --- derivatives ---------------------------------------------------------------------------------


def lean(run: Callable[..., Any], *given: Any) -> Any:
    """What `run` makes of tensors and what holds them, computed again for derivatives, so that
    nothing else is kept for these."""
    if not torch.is_grad_enabled() or is_transformed():
        return run(*given)
    kept: dict[str, Any] = {"preserve_rng_state": False, "determinism_check": "none"}
    return checkpoint(run, *given, use_reentrant=False, **kept)


def uncast(run: Callable[..., tuple[Any, ...]], *given: Any) -> tuple[Any, ...]:
    """What `run` makes of tensors and what holds them, with derivatives in their types, also where
    backward is called within autocast."""
    tensors, put = opened(given)
    if is_transformed() or unseen(*tensors):
        return run(*given)

    def made(*tensors: Tensor) -> tuple[Any, ...]:
        return run(*put(tensors))

    def followed(tensors: Sequence[Tensor]) -> tuple[list[Tensor], tuple[Any, ...]]:
        mine = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        with torch.enable_grad():
            return mine, made(*mine)

    def outputs(*tensors: Tensor) -> tuple[Any, ...]:
        mine, outs = followed(tensors)
        return tuple(x if x is None else x.detach() for x in outs), (), [(mine, outs)]

    def gradients(tensors: Any, _: Any, kept: list[Any], grads: Any) -> Sequence[Any]:
        # a graph is gone when it was followed back once
        mine, outs = kept.pop() if kept else followed(tensors)
        return gradients_of(outs, mine, [x.requires_grad for x in mine], grads)

    result: tuple[Any, ...] = Derived.apply(made, outputs, gradients, *tensors)  # type: ignore[no-untyped-call]
    return result


def opened(given: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors that something holds, and what puts others in their places."""
    leaves, tree = tree_flatten(given)

    def put(tensors: Sequence[Tensor]) -> Any:
        every = iter(tensors)
        return tree_unflatten([next(every) if isinstance(x, Tensor) else x for x in leaves], tree)

    return [x for x in leaves if isinstance(x, Tensor)], put


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
