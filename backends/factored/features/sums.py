"""Attention as sums of features: forward and backward block by block, in memory linear in n.

out_i = sum_j (f(q_i) . g(k_j)) v_j / sum_j f(q_i) . g(k_j), over all keys or those with j <= i.
Nothing of the size of the features is kept for the backward pass: it computes them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from attnspec.backends.factored.features.chunks import (
    Frames,
    gradients_of,
    gradients_of_sums,
    outputs_of,
    states_of,
    weights_of,
)
from attnspec.backends.factored.features.maps import Differentiated, FeatureMap, Features, Tables
from attnspec.backends.factored.features.spans import Framed, Given, Span, Sums


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


@dataclass(frozen=True)
class Found:
    """What comes out of a span: `sums` [N, S, R c, e] in the frames `logs`, the state before it and
    the one after."""

    span: Span
    sums: torch.Tensor
    logs: torch.Tensor | None
    state: State
    after: State


@dataclass(frozen=True)
class Keys:
    """The features [N, S, c, m] of the keys of a span, their values [N, S, c, e] and frames."""

    g: torch.Tensor
    w: torch.Tensor
    framed: Framed


def summed(sums: Sums, state: State) -> Iterator[Found]:
    """The sums of all queries, span by span, on top of those that `state` holds."""
    state = absorbed(sums, state)
    for span in sums.spans:
        if sums.how.causal:
            found = _causal(sums, _keys(sums, span, state.base), state, span)
            state = found.after
            yield found
        else:
            queries, f = _queries(sums, span)
            logs = sums.logs(queries, None, _column(state.base), span)
            y = f @ state.total[:, None]
            yield Found(span, y, logs, state, state)


def absorbed(sums: Sums, state: State) -> State:
    """What `state` holds and the keys before all queries."""
    for span in sums.before:
        keys = _keys(sums, span, state.base)
        state = State(_after(keys, state.sums), keys.framed.end)
    return state


def _causal(sums: Sums, keys: Keys, state: State, span: Span) -> Found:
    queries, f = _queries(sums, span)
    frames = keys.framed.local
    before = _or_zeros(state.sums, keys)
    states, after = states_of(before, keys.g, keys.w, frames, sums.room)
    weights, pairs = _weights(sums, span, frames, keys), None
    if sums.how.paired is not None:
        pairs = sums.how.paired.pairs(*_rows(sums, span))
    y = outputs_of(f, keys.g, keys.w, states, weights, frames, pairs)
    logs = sums.logs(queries, frames, keys.framed.start, span)
    return Found(span, y, logs, State(before, state.base), State(after, keys.framed.end))


def _keys(sums: Sums, span: Span, base: torch.Tensor | None) -> Keys:
    found = sums.masked(sums.how.map.keys(sums.keys(span), sums.given.tables), span)
    framed = sums.frames(found, base, span)
    return Keys(sums.chunked(found.values, span), sums.values(span), framed)


def _queries(sums: Sums, span: Span) -> tuple[Features, torch.Tensor]:
    found = sums.how.map.queries(sums.queries(span), sums.given.tables)
    return found, sums.chunked(found.values, span)


def _rows(sums: Sums, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [N, S, R c, d] and keys [N, S, c, d] of a span, those of padding 0."""
    keys = Features(sums.keys(span))
    return sums.chunked(sums.queries(span), span), sums.chunked(
        sums.masked(keys, span).values, span
    )


def _weights(sums: Sums, span: Span, frames: Frames | None, keys: Keys) -> torch.Tensor:
    """What the products of pairs of a chunk are multiplied with; none has a key of padding."""
    weights = weights_of(frames, span.chunk, sums.repeat, keys.g)
    padding = sums.given.padding
    if padding is None or sums.how.paired is None:
        # features of padding are 0
        return weights
    real = padding[:, None, span.low : span.high].expand(-1, sums.heads, -1)
    return weights * sums.lines(real, span)[:, :, None]


def _column(base: torch.Tensor | None) -> torch.Tensor | None:
    return None if base is None else base[:, None]


def _or_zeros(state: torch.Tensor | None, keys: Keys) -> torch.Tensor:
    if state is not None:
        return state
    return keys.g.new_zeros(len(keys.g), keys.g.shape[-1], keys.w.shape[-1])


def _after(keys: Keys, state: torch.Tensor | None) -> torch.Tensor:
    frames = keys.framed.local
    return states_of(_or_zeros(state, keys), keys.g, keys.w, frames)[1]


# --- backward ------------------------------------------------------------------------------------


class Gradients:
    """Fills the gradients of what was given span by span; those of features go through autograd to
    rows and tables."""

    def __init__(self, sums: Sums, into: Given) -> None:
        self.sums, self.into = sums, into

    def of_queries(self, span: Span, f: torch.Tensor, grad: torch.Tensor) -> None:
        """Takes the gradient of features f [N, S, R c, m] of the queries of a span."""
        sums = self.sums
        if self.into.gate is not None:
            along = sums.unchunked(-(f * grad).sum(-1, keepdim=True), span)
            self.into.gate[1][:, :, span.low : span.high] += along.sum((2, -1))
        found = self._through(sums.how.map.queries, sums.queries(span), f, grad)
        shape = (sums.batch * sums.heads, -1, sums.repeat * span.chunk, found.shape[-1])
        rows = sums.unchunked(found.reshape(shape), span)
        self.into.q[:, :, :, span.low - sums.first : span.high - sums.first] = rows

    def of_keys(self, span: Span, g: torch.Tensor, grad: torch.Tensor) -> None:
        """Takes the gradient of features g [N, S, c, m] of the keys of a span."""
        sums = self.sums
        padding = sums.given.padding
        rows = grad.reshape(sums.batch, sums.heads, -1, grad.shape[-1])
        if padding is not None:
            rows = rows.masked_fill(~padding[:, None, span.low : span.high, None], 0.0)
        at = slice(span.low, span.high)
        if self.into.gate is not None:
            along = (g * grad).sum(-1)
            self.into.gate[0][:, :, at] += along.reshape(sums.batch, sums.heads, -1)
        self.into.k[:, :, at] = self._through(sums.how.map.keys, sums.keys(span), g, rows)

    def of_values(self, span: Span, grad: torch.Tensor) -> None:
        """Takes the gradient of values [N, S, c, e], and of what stands behind them."""
        sums, size = self.sums, self.into.v.shape[-1]
        rows = grad[..., :size].reshape(sums.batch, sums.heads, -1, size)
        self.into.v[:, :, span.low : span.high] = rows

    def of_pairs(self, span: Span, grad_q: torch.Tensor, grad_k: torch.Tensor) -> None:
        """Adds gradients of the rows of a span, [N, S, R c, d] and [N, S, c, d]."""
        sums = self.sums
        rows = slice(span.low - sums.first, span.high - sums.first)
        self.into.q[:, :, :, rows] += sums.unchunked(grad_q, span)
        at = slice(span.low, span.high)
        self.into.k[:, :, at] += grad_k.reshape(sums.batch, sums.heads, -1, grad_k.shape[-1])

    def _through(
        self,
        features: Callable[..., Features],
        x: torch.Tensor,
        values: torch.Tensor,
        grad: torch.Tensor,
    ) -> torch.Tensor:
        given, into = self.sums.given.tables, self.into.tables
        return through(self.sums.how.map, features, x, values, grad, given, into)


def through(
    how: FeatureMap,
    features: Callable[..., Features],
    x: torch.Tensor,
    values: torch.Tensor,
    grad: torch.Tensor,
    tables: Tables,
    into: Tables,
) -> torch.Tensor:
    """The gradient of rows x, where `grad` is that of their features, which are `values`; those of
    tables that are learned are added to `into`."""
    shape = (*x.shape[:-1], grad.shape[-1])
    if isinstance(how, Differentiated):
        return how.back(x, values.reshape(shape), grad.reshape(shape), tables)
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        given = {
            name: table.detach().requires_grad_(table.requires_grad)
            for name, table in tables.items()
        }
        learned = [name for name, table in given.items() if table.requires_grad]
        values = features(x, given).values
    found: Sequence[torch.Tensor | None] = torch.autograd.grad(
        values,
        [x, *(given[name] for name in learned)],
        grad.reshape(shape),
        allow_unused=True,
    )
    for name, share in zip(learned, found[1:], strict=True):
        if share is not None:
            into[name].add_(share)
    return torch.zeros_like(x) if found[0] is None else found[0]


def differentiate(
    sums: Sums,
    into: Given,
    out: torch.Tensor,
    totals: torch.Tensor,
    grad: torch.Tensor,
    states: list[State],
    after: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Fills the gradients `into`, where that of the output is `grad` [B, K, R, n_q, d_v]; `totals`
    [B, K, R, n_q] are the sums of the weights, `states` those before each span of queries, and
    `after` is the gradient of the sums behind all keys. Returns that of the sums before all keys,
    [N, m, e]."""
    found = Gradients(sums, into)
    spans = list(zip(sums.spans, states, strict=True))
    for span, state in reversed(spans) if sums.how.causal else spans:
        rows = slice(span.low - sums.first, span.high - sums.first)
        parts = [x[:, :, :, rows].to(sums.kind) for x in (grad, out, totals[..., None])]
        grad_out, given_out, total = (
            sums.chunked(sums.stacked(part, span), span) for part in parts
        )
        queries, f = _queries(sums, span)
        if not sums.how.causal:
            logs = sums.logs(queries, None, _column(state.base), span)
            grad_y = sums.how.quotient.gradient(grad_out, given_out, total[..., 0], logs)
            share = (f.transpose(-1, -2) @ grad_y).sum(1)
            after = share if after is None else after + share
            found.of_queries(span, f, grad_y @ state.total[:, None].transpose(-1, -2))
            continue
        keys = _keys(sums, span, state.base)
        frames = keys.framed.local
        logs = sums.logs(queries, frames, keys.framed.start, span)
        grad_y = sums.how.quotient.gradient(grad_out, given_out, total[..., 0], logs)
        within, _ = states_of(state.total, keys.g, keys.w, frames, sums.room)
        weights, pairs = _weights(sums, span, frames, keys), None
        after = torch.zeros_like(state.total) if after is None else after
        if sums.how.paired is not None:
            with torch.enable_grad():
                rows_of = [x.detach().requires_grad_() for x in _rows(sums, span)]
                pairs = sums.how.paired.pairs(*rows_of)
        grad_f, grad_g, grad_w, after, grad_pairs = gradients_of(
            grad_y, f, keys.g, keys.w, within, after, weights, frames, _detached(pairs), sums.room
        )
        found.of_queries(span, f, grad_f)
        found.of_keys(span, keys.g, grad_g)
        found.of_values(span, grad_w)
        if pairs is not None:
            found.of_pairs(span, *torch.autograd.grad(pairs, rows_of, grad_pairs))
    bases = _bases(sums) if len(sums.before) > 1 else [None]
    for span, base in reversed(list(zip(sums.before, bases, strict=False))):
        keys = _keys(sums, span, base)
        if after is None:
            after = _or_zeros(None, keys)
        grad_g, grad_w, after = gradients_of_sums(after, keys.g, keys.w, keys.framed.local)
        found.of_keys(span, keys.g, grad_g)
        found.of_values(span, grad_w)
    return after


def _detached(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.detach()


def _bases(sums: Sums) -> list[torch.Tensor | None]:
    """The frames of the states before the spans of keys that come before the queries."""
    bases: list[torch.Tensor | None] = [None]
    for span in sums.before:
        found = sums.masked(sums.how.map.keys(sums.keys(span), sums.given.tables), span)
        bases.append(sums.frames(found, bases[-1], span).end)
        if bases[-1] is None:
            return [None] * len(sums.before)
    return bases[:-1]
