"""The kernel of all mechanisms whose weights are products of features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch

from attnspec.backends.common.torch_modes import Function, derivatives, is_transformed
from attnspec.backends.factored.features.chunks import Room
from attnspec.backends.factored.features.halves import (
    forgetting_sums_of_keys,
    given_of,
    outputs,
    summed_onward,
    sums_of_keys,
)
from attnspec.backends.factored.features.maps import Tables
from attnspec.backends.factored.features.spans import Given, Summing, Sums, shares
from attnspec.backends.factored.features.sums import State, differentiate, summed
from attnspec.backends.factored.low_rank.softmax import check_no_dropout, repeated
from attnspec.lower.work import Call

WHOLE = 1 << 62
"""More positions than there are: everything in one block."""

Gate = Callable[[torch.Tensor, Tables, "torch.Tensor | None"], "tuple[torch.Tensor, torch.Tensor]"]
"""From keys [B, H, n, d], tables and padding to the frames of keys and rows, float64 [B, H, n]."""


class Way(Protocol):
    """How the sums of all queries are computed where nothing else looks on."""

    def takes(self, given: Given) -> bool:
        """Whether it can; where it cannot, `Blockwise` does."""

    def outputs(self, how: Summing, given: Given) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """What they are worth [B, K, R, n_q, d_v], the sums of their weights [B, K, R, n_q], and
        what it keeps for gradients."""

    def gradients(
        self,
        how: Summing,
        given: Given,
        found: tuple[torch.Tensor, torch.Tensor, Any],
        grad: torch.Tensor,
    ) -> Given:
        """The gradients of what is given, where `grad` is that of the outputs that were found."""


class Blockwise:
    """Block by block in tensor products, on any device."""

    def takes(self, given: Given) -> bool:
        return True

    def outputs(self, how: Summing, given: Given) -> tuple[torch.Tensor, torch.Tensor, Any]:
        return outputs(how, given, State())

    def gradients(
        self,
        how: Summing,
        given: Given,
        found: tuple[torch.Tensor, torch.Tensor, Any],
        grad: torch.Tensor,
    ) -> Given:
        into, room = given.gradients(), Room()
        out, totals, kept = found
        for share, states in zip(shares(how, given), kept, strict=True):
            sums = Sums(how, given.part(share), room=room)
            at = out[share], totals[share], grad[share]
            differentiate(sums, into.part(share), *at, states)
        return into


BLOCKWISE = Blockwise()


@dataclass(frozen=True)
class FeatureKernel:
    """Runs the mechanism `name`, whose features are summed as `how` says.

    `draws` gives what is drawn, by the size of the heads, their type and the number of the draw;
    with `by_head` every query head has features of its own, also of the key head that it shares
    with others. `gate` gives the frames of a forgetting sum. `way` is how a call computes it.
    """

    name: str
    how: Summing
    by_head: bool = False
    draws: Callable[[int, torch.dtype, torch.device, int], Tables] | None = None
    gate: Gate | None = None
    way: Way = BLOCKWISE

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        check_no_dropout(self.name, call.dropout_p)
        out = summed_up(self.how, self.given(q, k, v, call), self.way)
        return out.reshape(*q.shape[:3], v.shape[-1])

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the logarithms [B, H, n_q] of what its rows are divided by."""
        check_no_dropout(self.name, call.dropout_p)
        sums = Sums(self.how, self.given(q, k, v, call), WHOLE if is_transformed() else None)
        return self._worth(sums, State(), q, v)[0]

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        state: object,
        with_lse: bool = False,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None], object]:
        """The causal sums of more positions with the logarithms of what they are divided by, on top
        of the sums that `state` holds, None at first."""
        check_no_dropout(self.name, call.dropout_p)
        given = self.given(q, k, v, call)
        before = state if isinstance(state, State) else State()
        if given.gate is not None:
            # the frames of a gate count from the state
            before = State(before.sums)
        return self._worth(Sums(self.how, given), before, q, v)

    def _worth(
        self, sums: Sums, after: State, q: torch.Tensor, v: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None], State]:
        """What the sums on top of a state are worth [B, H, n_q, d_v], the logarithms [B, H, n_q] of
        what they are divided by, None where that may be negative or is nothing, and the state
        after them."""
        quotient, outs, logs = self.how.quotient, [], []
        for found in summed(sums, after):
            after = found.after
            outs.append(sums.unchunked(quotient.of(found.sums, found.logs), found.span))
            if quotient.positive:
                log = quotient.log_divisor(found.sums[..., -1], found.logs)
                logs.append(sums.unchunked(log[..., None], found.span))
        out = torch.cat(outs, 3).to(q.dtype).reshape(*q.shape[:3], v.shape[-1])
        return (out, torch.cat(logs, 3).reshape(q.shape[:3]) if logs else None), after

    def key_sums(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, at: torch.Tensor
    ) -> tuple[State, torch.Tensor | None]:
        """The sums over these keys [N, m, e], wherever they are; q tells heads and types alone. Of
        a gate also the logarithms of what it leaves of sums before, [N]."""
        check_no_dropout(self.name, call.dropout_p)
        given = self.given(q[:, :, :0], k, v, call)
        if given.gate is not None:
            return forgetting_sums_of_keys(self.how, given)
        return sums_of_keys(self.how, given), None

    def onward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, before: State
    ) -> torch.Tensor:
        """The outputs of queries on top of the sums over keys elsewhere: those before all of these
        positions where it is causal, else those over all keys, these among them."""
        if not self.how.causal:
            k, v, call = k[:, :, :0], v[:, :, :0], replace(call, padding=None)
        out = summed_onward(self.how, self.given(q, k, v, call), before)
        return out.reshape(*q.shape[:3], v.shape[-1])

    def given(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call) -> Given:
        """What is summed: heads beside the key head that they read, and all tables."""
        batch, heads, rows, size = q.shape
        kind = torch.promote_types(q.dtype, torch.float32)
        tables = {name: table.to(kind) for name, table in call.tables.items()}
        if self.draws is not None:
            tables.update(self.draws(size, kind, q.device, call.draw))
        if self.by_head:
            k, v = repeated(k, heads), repeated(v, heads)
        gate = None if self.gate is None else self.gate(k, tables, call.padding)
        q = q.reshape(batch, k.shape[1], heads // k.shape[1], rows, size)
        return Given(q, k, v, call.padding, gate, tables)


def summed_up(how: Summing, given: Given, way: Way = BLOCKWISE) -> torch.Tensor:
    """What the sums of all queries are worth [B, K, R, n_q, d_v]."""
    names = sorted(given.tables)
    parts = [given.q, given.k, given.v, *(given.gate or ()), *(given.tables[x] for x in names)]
    if is_transformed():
        return composed(how, given)
    way = way if way.takes(given) else BLOCKWISE
    if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
        out: torch.Tensor = _Summed.apply(  # type: ignore[no-untyped-call]
            way, how, given.padding, names, *parts
        )
        return out
    return way.outputs(how, given)[0].to(given.q.dtype)


def composed(how: Summing, given: Given) -> torch.Tensor:
    """The same in operations that differentiate to any order, all positions in one block."""
    sums, outs = Sums(how, given, WHOLE), []
    for found in summed(sums, State()):
        outs.append(sums.unchunked(how.quotient.of(found.sums, found.logs), found.span))
    return torch.cat(outs, 3).to(given.q.dtype)


class _Summed(Function):
    """A way, and composed for derivatives of the derivative."""

    @staticmethod
    def forward(ctx, way, how, padding, names, *parts):  # type: ignore[no-untyped-def]
        given = given_of(padding, names, parts)
        out, totals, ctx.kept = way.outputs(how, given)
        ctx.way, ctx.how, ctx.padding, ctx.names = way, how, padding, names
        ctx.save_for_backward(*parts, out, totals)
        return out.to(given.q.dtype)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        *parts, out, totals = ctx.saved_tensors
        made = partial(given_of, ctx.padding, ctx.names)
        given = made(parts)
        if torch.is_grad_enabled():

            def run(*parts):  # type: ignore[no-untyped-def]
                return [composed(ctx.how, made(parts))]

            grads = derivatives(run, parts, [x.requires_grad for x in parts], [grad])
        else:
            into = ctx.way.gradients(ctx.how, given, (out, totals, ctx.kept), grad)
            grads = [into.q, into.k, into.v, *(into.gate or ())]
            grads += [into.tables[name] for name in ctx.names]
        return None, None, None, None, *grads
