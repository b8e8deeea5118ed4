"""The kernel of all mechanisms whose weights are products of features.

Sources: Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 and 3.3, of `linear`;
those of random and Taylor features in `maps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.torch_modes import is_transformed, unseen
from attnspec.backends.factored.definitions import cancels
from attnspec.backends.factored.directions import directions
from attnspec.backends.factored.features.maps import FeatureMap, Tables
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.backends.factored.features.sums import (
    Derived,
    Given,
    State,
    Summing,
    Sums,
    absorbed,
    blocks_of,
    cut,
    given_of,
    no_keys,
    room_of,
    shares,
    summed,
    values_of,
)
from attnspec.backends.factored.softmax import check_no_dropout, repeated, without_padding
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.linear import Linear
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.mechanisms.rfa import Rfa
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work, mechanism_of


class Way:
    """Sums of all queries with a backward of their own, here those over all keys, of features that
    are many or cheap: only the sums over keys are kept, and features are made again for gradients,
    which are written where they belong. `whole` sums, which are not divided, are sums, too."""

    whole = True

    def takes(self, how: Summing, given: Given) -> bool:
        """Whether it can; where it cannot, autograd differentiates blocks."""
        if how.causal or not all(x.numel() for x in given.tensors):
            return False
        return isinstance(how.map.declared, Linear) or how.wide(given)

    def outputs(self, how: Summing, given: Given) -> tuple[Sums, Any]:
        """The sums, and what is kept for gradients."""
        return summed(how, given, no_keys(how, given))

    def gradients(
        self,
        how: Summing,
        given: Given,
        found: tuple[Tensor, Tensor, Any],
        grads: Sequence[Tensor],
    ) -> Given:
        """The gradients of what is given, where `grads` are those of outputs and sums of weights,
        and `found` are these and what was kept."""
        room, into = room_of(how, given), given.gradients()
        learned = [name for name, table in given.tables.items() if table.requires_grad]
        out, totals, state = found
        tensors = out, totals, *grads, state.sums
        rows = zip(*(cut(x, room) for x in tensors), strict=True)
        bases = [None] * len(cut(state.sums, room)) if state.base is None else cut(state.base, room)
        parts = zip(shares(given, room), shares(into, room), rows, bases, strict=True)
        for part, target, (*mine, sums), base in parts:
            after, its = torch.zeros_like(sums), (part.tables, target.tables, learned)
            queries, keys = (blocks_of(how, part)[x] for x in (1, 0))
            sizes = [x.q.shape[3] for x in queries]
            beside = zip(*(torch.split(x, sizes, 3) for x in (target.q, *mine)), strict=True)
            for block, (of_q, *some) in zip(queries, beside, strict=True):
                out, total, grad, of_total = (x.flatten(2, 3) for x in some)
                x = block.q.to(given.kind).flatten(2, 3)
                f, log, back = followed(how.map, x, *its)
                if base is not None and log is not None:
                    log = log + base[..., None]
                above = how.quotient.gradient(grad, out, total, log, of_total)
                after += f.mT @ above
                of_q.copy_(back(above @ sums.mT).view(of_q.shape))
            for block, of in zip(keys, blocks_of(how, target)[0], strict=True):
                x = without_padding(block.k, block.padding).to(given.kind)
                g, log, back = followed(how.map, x, *its)
                w, of_v, factor = values_of(how, block), g @ after, None
                if base is not None and log is not None:
                    factor = torch.exp(log - base[..., None])[..., None]
                if block.padding is not None:
                    real = block.padding[:, None, :, None].to(given.kind)
                    factor = real if factor is None else factor.where(real > 0, 0.0)
                if factor is not None:
                    w, of_v = w * factor, of_v * factor
                of.k.copy_(back(w @ after.mT))
                of.v.copy_(of_v[..., : of.v.shape[-1]])
        return into


ALL_KEYS = Way()


def followed(
    features: FeatureMap, x: Tensor, tables: Tables, into: Tables, learned: Sequence[str]
) -> tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]:
    """The features of rows x and their frames, and what makes the gradient of x of that of the
    features, either of which it may write over; it adds those of learned tables to others."""
    if getattr(features.declared, "feature", None) == "elu1":
        values, log = features(x, tables)
        # their slope is what they are, 1 at most
        return values, log, lambda grad: grad.mul_(values.clamp_(max=1.0))
    leaves = [y.detach().requires_grad_() for y in (x, *(tables[name] for name in learned))]
    with torch.enable_grad():
        values, log = features(leaves[0], {**tables, **dict(zip(learned, leaves[1:], strict=True))})

    def back(grad: Tensor) -> Tensor:
        of_x, *others = torch.autograd.grad(values, leaves, grad, allow_unused=True)
        for name, share in zip(learned, others, strict=True):
            if share is not None:
                into[name].add_(share)
        return of_x

    return values.detach(), log, back


@dataclass(frozen=True)
class FeatureKernel:
    """Runs a mechanism, whose features are summed as `how` says; `way` computes what it takes.

    Where features are drawn, every query head has some of its own, also of the key head that it
    shares with others.
    """

    work: Work
    heads: tuple[int, ...]
    how: Summing
    way: Way = ALL_KEYS

    @property
    def name(self) -> str:
        return self.how.map.declared.name

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self._worth(self.given(q, k, v, call), None, False)[0][0]

    def partial(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
        """The output and the logarithms [B, H, n_q] of what its rows are divided by, None where
        that may be negative or is nothing."""
        return self._worth(self.given(q, k, v, call), None, True)[0]

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        state: object,
        with_lse: bool = False,
    ) -> tuple[tuple[Tensor, Tensor | None], object]:
        """The same of the causal sums of more positions, on top of those that `state` holds, None
        at first, and the state after them."""
        request = self.given(q, k, v, call)
        before = state if isinstance(state, State) else no_keys(self.how, request)
        if request.gate:
            # the frames of a gate count from the state
            before = State(before.sums)
        return self._worth(request, before, True)

    def onward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, before: State) -> Tensor:
        """The outputs of queries on top of the sums over keys elsewhere: those before all of these
        positions where it is causal, else those over all keys, these among them."""
        if not self.how.causal:
            k, v, call = k[:, :, :0], v[:, :, :0], replace(call, padding=None)
        return self._worth(self.given(q, k, v, call), before, False)[0][0]

    def key_sums(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, at: Tensor
    ) -> tuple[State, Tensor | None]:
        """The sums over these keys [B, K, m, e], wherever they are; q tells heads and types alone.
        Of a gate they are as they stand after the last key, with the logarithms of what it leaves
        of sums before, [B, K]."""
        request, how = self.given(q[:, :, :0], k, v, call), self.how
        if not request.gate:
            return absorbed(how, request, no_keys(how, request)), None
        keys, rows = request.gate
        last = rows[..., -1:] if rows.shape[-1] else rows.sum(-1, keepdim=True)
        values = values_of(how, request) * torch.exp(keys - last)[..., None].to(request.kind)
        how = replace(how, quotient=Quotient(divides=False))
        request = replace(request, v=values, gate=())
        sums = absorbed(how, request, no_keys(how, request))
        return sums, -last[..., 0].to(request.kind)

    def given(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Given:
        """What is summed: heads beside the key head that they read, and all tables."""
        check_no_dropout(self.name, call.dropout_p)
        batch, heads, rows, size = q.shape
        kind, declared = torch.promote_types(q.dtype, torch.float32), self.how.map.declared
        tables = {name: table.to(kind) for name, table in call.tables.items()}
        gate: tuple[Tensor, ...] = ()
        if isinstance(declared, Favor | Rbf | Rfa):
            # drawn anew every so many calls in training, never where that is 0
            redraw, (calls, asked) = getattr(declared, "redraw", 0), call.draws
            draw = calls // redraw + asked if redraw else 0
            tables["directions"] = directions(declared, self.work.layer, self.heads, draw, q)
            k, v = repeated(k, heads), repeated(v, heads)
            if getattr(declared, "gated", False):
                gate = gate_frames(k, tables, call.padding)
        q = q.reshape(batch, k.shape[1], heads // k.shape[1], rows, size)
        return Given(q, k, v, call.padding, gate, tables)

    def sums(self, given: Given) -> tuple[Tensor, Tensor]:
        """The sums of all queries [B, K, R, n_q, e] before they are divided, that of the weights
        last, and their frames [B, K, R, n_q], constants."""
        whole = replace(self.how, quotient=Quotient(whole=True))
        how = whole if self.way.whole else replace(whole, quotient=Quotient())
        (sums, totals, log), _ = self.results(how, given, None)
        if not self.way.whole:
            divisor = how.quotient.divisor(totals, log)
            sums = torch.cat([sums * divisor[..., None], totals[..., None]], -1)
        return sums, torch.zeros_like(totals.detach()) if log is None else log

    def results(self, how: Summing, given: Given, state: State | None) -> tuple[Sums, State | None]:
        """The sums of all queries on top of a state, and the one after them; there is none after a
        call that starts with None and goes its way."""
        if state is None and not is_transformed() and self.way.takes(how, given):
            return by_way(self.way, how, given), None
        return summed(how, given, state or no_keys(how, given))

    def _worth(
        self, given: Given, state: State | None, with_lse: bool
    ) -> tuple[tuple[Tensor, Tensor | None], State | None]:
        """As `step`."""
        (out, total, log), after = self.results(self.how, given, state)
        quotient, lse = self.how.quotient, None
        if with_lse and quotient.positive:
            lse = quotient.log_divisor(total, log).flatten(1, 2)
        return (out.to(given.q.dtype).flatten(1, 2), lse), after


# --- with a backward of its own ------------------------------------------------------------------


def by_way(way: Way, how: Summing, given: Given) -> Sums:
    """The outputs, the sums of weights and their frames, with gradients."""
    if unseen(*given.tensors):
        return way.outputs(how, given)[0]
    frame = given.frame

    def run(*tensors: Tensor) -> Sums:
        again = given_of(frame, tensors)
        return summed(how, again, no_keys(how, again))[0]

    def outputs(*tensors: Tensor) -> tuple[Any, ...]:
        outs, kept = way.outputs(how, given_of(frame, tensors))
        return outs, outs[:2], kept

    def gradients(tensors: Any, saved: Any, kept: Any, grads: Any) -> Sequence[Tensor]:
        pairs = zip(saved, grads[:2], strict=True)
        above = [torch.zeros_like(x) if y is None else y for x, y in pairs]
        return way.gradients(how, given_of(frame, tensors), (*saved, kept), above).tensors

    sums: Sums = Derived.apply(run, outputs, gradients, *given.tensors)  # type: ignore[no-untyped-call]
    return sums[0], sums[1], None if sums[2] is None else sums[2].detach()


# --- the kernel of each mechanism ----------------------------------------------------------------


def feature_kernel(work: Work, heads: tuple[int, ...]) -> FeatureKernel:
    """Runs the mechanism of a work."""
    features = FeatureMap(work)
    text, chunk = features.text, LIMITS.taylor_chunk if features.paired else LIMITS.feature_chunk
    added, least, floor = (text[name] for name in ("ADDED", "LEAST", "FLOOR"))
    signed = cancels(mechanism_of(work))
    quotient = Quotient(text["NORMALIZE"] != "none", added, least, floor, signed)
    return FeatureKernel(work, heads, Summing(features, work.causal, quotient, chunk))


def gate_frames(k: Tensor, tables: Tables, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Frames t, r [B, H, n] in float64 of sums S_i = g_i S_(i-1) + (1 - g_i) f_i: a key j weighs
    exp(t_j - r_i) = (1 - g_j) g_(j+1) ... g_i, with g = sigmoid(gate . k + gate_bias).

    Padding passes the sums on as they are.
    """
    logits = (k.to(torch.promote_types(k.dtype, torch.float32)) * tables["gate"][:, None]).sum(-1)
    logits = (logits + tables["gate_bias"][:, None]).double()
    kept = functional.logsigmoid(logits)
    if padding is not None:
        kept = kept.masked_fill(~padding[:, None], 0.0)
    rows = -kept.cumsum(-1)
    return functional.logsigmoid(-logits) + rows, rows
