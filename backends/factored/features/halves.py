"""Sums of features in two halves, each with its gradient: those over keys, and the outputs of
queries on top of sums that others may have found or merged.

Block by block, as sums in one piece; frames are constants to autograd here too. There are no
second derivatives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad

from attnspec.backends.common.merging import LOWEST
from attnspec.backends.common.torch_modes import Function
from attnspec.backends.factored.features.chunks import Room
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.backends.factored.features.spans import Given, Share, Summing, Sums, shares
from attnspec.backends.factored.features.sums import State, absorbed, differentiate, summed


def sums_of_keys(how: Summing, given: Given) -> State:
    """The sums [N, m, e] over all keys, where there are no queries and no gate."""
    if not given.k.shape[2]:
        kind = torch.promote_types(given.k.dtype, torch.float32)
        width = given.v.shape[-1] + how.quotient.divides
        rows = given.k.shape[:2].numel()
        sums = given.k.new_zeros(rows, how.map.width(given.k.shape[-1]), width, dtype=kind)
        return State(sums, sums.new_full((rows,), LOWEST))
    names = sorted(given.tables)
    tables = [given.tables[name] for name in names]
    sums, base = _OfKeys.apply(  # type: ignore[no-untyped-call]
        how, given.padding, names, given.q, given.k, given.v, *tables
    )
    return State(sums, base)


def forgetting_sums_of_keys(how: Summing, given: Given) -> tuple[State, torch.Tensor]:
    """The same where a gate forgets, as they are after the last key, and the logarithms of what it
    leaves of the sums before, [N]."""
    if given.gate is None:
        raise ValueError("no gate forgets anything")
    keys, rows = given.gate
    last = rows[..., -1:] if rows.shape[-1] else rows.sum(-1, keepdim=True)
    values = given.v.to(torch.promote_types(given.v.dtype, torch.float32))
    if how.quotient.divides:
        values = pad(values, (0, 1), value=1.0)
    weighed = replace(
        given, v=values * torch.exp(keys - last)[..., None].to(values.dtype), gate=None
    )
    found = sums_of_keys(replace(how, quotient=Quotient(divides=False)), weighed)
    return State(found.sums), -last.flatten().to(values.dtype)


def summed_onward(how: Summing, given: Given, before: State) -> torch.Tensor:
    """What the sums of all queries are worth [B, K, R, n_q, d_v], on top of those before."""
    names, gate = sorted(given.tables), given.gate or ()
    rest = *gate, *(given.tables[name] for name in names)
    out: torch.Tensor = _Onward.apply(  # type: ignore[no-untyped-call]
        how, given.padding, names, before.base, before.total, given.q, given.k, given.v, *rest
    )
    return out


def outputs(
    how: Summing, given: Given, before: State
) -> tuple[torch.Tensor, torch.Tensor, list[list[State]]]:
    """The same in float32 at least, since gradients of queries may be small beside what is rounded
    in an output; the sums of the weights [B, K, R, n_q], and, for each share, the states before its
    spans."""
    kind = torch.promote_types(given.q.dtype, torch.float32)
    out = given.q.new_empty(*given.q.shape[:-1], given.v.shape[-1], dtype=kind)
    totals = torch.zeros(given.q.shape[:-1], dtype=kind, device=out.device)
    states: list[list[State]] = []
    room = Room()
    for share in shares(how, given):
        sums = Sums(how, given.part(share), room=room)
        start = State(_part(before.sums, given, share), _part(before.base, given, share))
        states.append([])
        for found in summed(sums, start):
            rows = slice(found.span.low - sums.first, found.span.high - sums.first)
            some = sums.unchunked(how.quotient.of(found.sums, found.logs), found.span)
            out[share][:, :, :, rows] = some
            if how.quotient.divides:
                total = sums.unchunked(found.sums[..., -1:], found.span)
                totals[share][:, :, :, rows] = total[..., 0]
            states[-1].append(found.state)
    return out, totals, states


class _OfKeys(Function):
    @staticmethod
    def forward(ctx, how, padding, names, q, k, v, *tables):  # type: ignore[no-untyped-def]
        given = Given(q, k, v, padding, None, dict(zip(names, tables, strict=True)))
        ctx.how, ctx.padding, ctx.names = how, padding, names
        ctx.save_for_backward(q, k, v, *tables)
        found = [
            (share, absorbed(Sums(how, given.part(share)), State())) for share in shares(how, given)
        ]
        sums = _joined(given, [(share, state.total) for share, state in found])
        base = None
        if found[0][1].base is not None:
            base = _joined(given, [(share, state.base) for share, state in found])
        if base is not None:
            ctx.mark_non_differentiable(base)
        return sums, base

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):  # type: ignore[no-untyped-def]
        q, k, v, *tables = ctx.saved_tensors
        given = Given(q, k, v, ctx.padding, None, dict(zip(ctx.names, tables, strict=True)))
        into, nothing = given.gradients(), v.new_zeros(*q.shape[:-1], v.shape[-1])
        for share in shares(ctx.how, given):
            sums = Sums(ctx.how, given.part(share))
            at = nothing[share], nothing[share][..., 0], nothing[share]
            differentiate(sums, into.part(share), *at, [], _part(grad, given, share))
        return None, None, None, None, into.k, into.v, *(into.tables[name] for name in ctx.names)


class _Onward(Function):
    @staticmethod
    def forward(ctx, how, padding, names, base, before, *parts):  # type: ignore[no-untyped-def]
        given = given_of(padding, names, parts)
        out, totals, ctx.states = outputs(how, given, State(before, base))
        ctx.how, ctx.padding, ctx.names = how, padding, names
        ctx.save_for_backward(*parts, out, totals)
        return out.to(given.q.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        *parts, out, totals = ctx.saved_tensors
        given = given_of(ctx.padding, ctx.names, parts)
        into, room, found = given.gradients(), Room(), []
        for share, states in zip(shares(ctx.how, given), ctx.states, strict=True):
            sums = Sums(ctx.how, given.part(share), room=room)
            at = out[share], totals[share], grad[share]
            found.append((share, differentiate(sums, into.part(share), *at, states)))
        rest = *(into.gate or ()), *(into.tables[name] for name in ctx.names)
        of_before = _joined(given, found) if given.q.shape[3] else None
        return None, None, None, None, of_before, into.q, into.k, into.v, *rest


def given_of(
    padding: torch.Tensor | None, names: Sequence[str], parts: Sequence[torch.Tensor]
) -> Given:
    """What is given, of q, k, v, a gate's frames if there are any, and tables."""
    q, k, v, *rest = parts
    gate = (rest[0], rest[1]) if len(rest) > len(names) else None
    tables = dict(zip(names, rest[2:] if gate else rest, strict=True))
    return Given(q, k, v, padding, gate, tables)


def _part(x: torch.Tensor | None, given: Given, share: Share) -> torch.Tensor | None:
    """What belongs to a share of [N, ...] for the N samples and key heads that are given."""
    if x is None:
        return None
    return x.view(*given.k.shape[:2], *x.shape[1:])[share].flatten(0, 1)


def _joined(given: Given, parts: Sequence[tuple[Share, torch.Tensor | None]]) -> torch.Tensor:
    """Parts of all shares [.., m, e] as one [N, ...]."""
    every = [(share, part) for share, part in parts if part is not None]
    first = every[0][1]
    found = first.new_empty(*given.k.shape[:2], *first.shape[1:])
    for share, part in every:
        into = found[share]
        into.copy_(part.view(into.shape))
    return found.flatten(0, 1)
