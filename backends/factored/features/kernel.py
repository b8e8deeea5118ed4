"""The kernel of all mechanisms whose weights are products of features.

Sources: Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 and 3.3, of `linear`;
those of random and Taylor features in `maps`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch.nn import functional

from attnspec.backends.common.torch_modes import Function, derivatives, is_transformed, unseen
from attnspec.backends.factored.features.directions import directions
from attnspec.backends.factored.features.maps import (
    Elementwise,
    FeatureMap,
    FirstOrder,
    RandomFeatures,
    SecondOrder,
    Tables,
    UnitWaves,
)
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.backends.factored.features.sums import (
    Given,
    State,
    Summing,
    absorbed,
    blocks_of,
    cut,
    features_of_keys,
    given_of,
    no_sums,
    room_of,
    shares,
    summed,
    values_of,
)
from attnspec.backends.factored.softmax import check_no_dropout, repeated
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.linear import Linear
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.mechanisms.rfa import Rfa
from attnspec.ir.mechanisms.taylor import Taylor
from attnspec.limits import LIMITS
from attnspec.lower.work import Call, Work

SMALL = 1e-6
"""What is added to sums of weights, or how far those that may vanish are kept from 0."""

Gate = Callable[[torch.Tensor, Tables, "torch.Tensor | None"], "tuple[torch.Tensor, torch.Tensor]"]
"""From keys [B, H, n, d], tables and padding to the frames of keys and rows, float64 [B, H, n]."""


class Way(Protocol):
    """Sums of all queries with a backward of their own."""

    def takes(self, how: Summing, given: Given) -> bool:
        """Whether it can; where it cannot, autograd differentiates blocks."""

    def outputs(
        self, how: Summing, given: Given
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, Any]:
        """What they are worth [B, K, R, n_q, d_v], the sums of their weights [B, K, R, n_q] and the
        frames of these, if there are any, and what is kept for gradients."""

    def gradients(
        self,
        how: Summing,
        given: Given,
        found: tuple[torch.Tensor, torch.Tensor, Any],
        grads: tuple[torch.Tensor, torch.Tensor | None],
    ) -> Given:
        """The gradients of what is given, where `grads` are those of outputs and sums of weights,
        and `found` are these and what was kept."""


class AllKeys:
    """Elementwise features without frames, summed over all keys on the CPU: features are made again
    for gradients, which are written where they belong."""

    def takes(self, how: Summing, given: Given) -> bool:
        if how.causal or not isinstance(how.map, Elementwise) or how.map.feature == "exp":
            return False
        return all(x.numel() for x in given.tensors)

    def outputs(
        self, how: Summing, given: Given
    ) -> tuple[torch.Tensor, torch.Tensor, None, list[torch.Tensor]]:
        room = room_of(how, given)
        shape = given.q.shape[:-1]
        out = given.q.new_empty(*shape, given.v.shape[-1], dtype=given.kind)
        totals = torch.zeros(shape, dtype=given.kind, device=out.device)
        into = cut(out, room), cut(totals, room)
        kept = []
        for part, of_out, of_total in zip(shares(given, room), *into, strict=True):
            state = absorbed(how, part, State()).total
            kept.append(state)
            for some, its, total in _beside(how, part, of_out, of_total):
                f = how.map(some.q.to(given.kind), {}).values
                sums = f.flatten(2, 3) @ state.view(*part.k.shape[:2], *state.shape[1:])
                its.copy_(how.quotient.of(sums, None).view(its.shape))
                if how.quotient.divides:
                    total.copy_(sums[..., -1].view(total.shape))
        return out, totals, None, kept

    def gradients(
        self,
        how: Summing,
        given: Given,
        found: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]],
        grads: tuple[torch.Tensor, torch.Tensor | None],
    ) -> Given:
        map_, room, into = cast(Elementwise, how.map), room_of(how, given), given.gradients()
        out, totals, kept = found
        of_totals = torch.zeros_like(totals) if grads[1] is None else grads[1]
        rows = zip(*(cut(x, room) for x in (out, totals, grads[0], of_totals)), strict=True)
        parts = zip(shares(given, room), shares(into, room), rows, kept, strict=True)
        for part, target, mine, state in parts:
            state = state.view(*part.k.shape[:2], *state.shape[1:])
            after = torch.zeros_like(state)
            for some, of_q, *its in _beside(how, part, target.q, *mine):
                x = some.q.flatten(2, 3).to(given.kind)
                its = [y.flatten(2, 3) for y in its]
                above = how.quotient.gradient(its[2], its[0], its[1], None, its[3])
                f = map_(x, {}).values
                after += f.transpose(-1, -2) @ above
                of_q.copy_(map_.back(x, f, above @ state.transpose(-1, -2)).view(of_q.shape))
            for some, its in zip(*(blocks_of(how, x)[0] for x in (part, target)), strict=True):
                g, w, x = features_of_keys(how, some).values, values_of(how, some), some.k
                of_v = (g @ after)[..., : its.v.shape[-1]]
                of_k = map_.back(x.to(given.kind), g, w @ after.transpose(-1, -2))
                if some.padding is not None:
                    of_k = of_k.masked_fill(~some.padding[:, None, :, None], 0.0)
                its.k.copy_(of_k)
                its.v.copy_(of_v)
        return into


ALL_KEYS = AllKeys()


def _beside(how: Summing, given: Given, *others: torch.Tensor) -> list[tuple[Any, ...]]:
    """The blocks of queries, and those of other tensors [B, K, R, n_q, …] beside them."""
    rows = blocks_of(how, given)[1]
    sizes = [x.q.shape[3] for x in rows]
    return list(zip(rows, *(torch.split(x, sizes, 3) for x in others), strict=True))


@dataclass(frozen=True)
class FeatureKernel:
    """Runs the mechanism `name`, whose features are summed as `how` says.

    `draws` gives what is drawn, by the size of the heads, their type and the number of the draw;
    with `by_head` every query head has features of its own, also of the key head that it shares
    with others. `gate` gives the frames of a forgetting sum. `way` computes what it takes.
    """

    name: str
    how: Summing
    by_head: bool = False
    draws: Callable[[int, torch.dtype, torch.device, int], Tables] | None = None
    gate: Gate | None = None
    way: Way = ALL_KEYS

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> torch.Tensor:
        return self._worth(q, k, v, call, None, False)[0][0]

    def partial(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output and the logarithms [B, H, n_q] of what its rows are divided by, None where
        that may be negative or is nothing."""
        return self._worth(q, k, v, call, None, True)[0]

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        state: object,
        with_lse: bool = False,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None], object]:
        """The same of the causal sums of more positions, on top of those that `state` holds, None
        at first, and the state after them."""
        before = state if isinstance(state, State) else State()
        if self.gate is not None:
            # the frames of a gate count from the state
            before = State(before.sums)
        return self._worth(q, k, v, call, before, True)

    def onward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, before: State
    ) -> torch.Tensor:
        """The outputs of queries on top of the sums over keys elsewhere: those before all of these
        positions where it is causal, else those over all keys, these among them."""
        if not self.how.causal:
            k, v, call = k[:, :, :0], v[:, :, :0], replace(call, padding=None)
        return self._worth(q, k, v, call, before, False)[0][0]

    def key_sums(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, at: torch.Tensor
    ) -> tuple[State, torch.Tensor | None]:
        """The sums over these keys [N, m, e], wherever they are; q tells heads and types alone. Of
        a gate they are as they stand after the last key, with the logarithms of what it leaves of
        sums before, [N]."""
        check_no_dropout(self.name, call.dropout_p)
        given = self.given(q[:, :, :0], k, v, call)
        if given.gate is None:
            return _of_keys(self.how, given), None
        keys, rows = given.gate
        last = rows[..., -1:] if rows.shape[-1] else rows.sum(-1, keepdim=True)
        values = values_of(self.how, given) * torch.exp(keys - last)[..., None].to(given.kind)
        how = replace(self.how, quotient=Quotient(divides=False))
        return _of_keys(how, replace(given, v=values, gate=None)), -last.flatten().to(given.kind)

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

    def sums(self, given: Given) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of all queries [B, K, R, n_q, e] before they are divided, that of the weights
        last, and their frames [B, K, R, n_q], constants."""
        how = replace(self.how, quotient=Quotient())
        if not self._goes_its_way(how, given):
            found, logs, _ = summed(how, given, State(), lambda sums, logs: (sums, logs))
            return found, torch.zeros_like(found[..., 0].detach()) if logs is None else logs
        out, totals, logs = _by_way(self.way, how, given)
        divisor = how.quotient.divisor(totals, logs)
        found = torch.cat([out * divisor[..., None], totals[..., None]], -1)
        return found, torch.zeros_like(totals.detach()) if logs is None else logs

    def _goes_its_way(self, how: Summing, given: Given) -> bool:
        return not is_transformed() and self.way.takes(how, given)

    def _worth(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: Call,
        state: State | None,
        with_lse: bool,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor | None], State]:
        """As `step`; the state after a call that starts with None may be that before it."""
        check_no_dropout(self.name, call.dropout_p)
        out, log, after = self.worth(self.how, self.given(q, k, v, call), state, with_lse)
        out = out.to(q.dtype).reshape(*q.shape[:3], v.shape[-1])
        return (out, None if log is None else log.reshape(q.shape[:3])), after

    def worth(
        self, how: Summing, given: Given, state: State | None, with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None, State]:
        """The same of what is given: rows [B, K, R, n_q, d_v] and logarithms [B, K, R, n_q]."""
        quotient = how.quotient

        def finish(
            sums: torch.Tensor, logs: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if not (with_lse and quotient.positive):
                return quotient.of(sums, logs), None
            return quotient.of(sums, logs), quotient.log_divisor(sums[..., -1], logs)

        if state is not None or not self._goes_its_way(how, given):
            return summed(how, given, state or State(), finish)
        out, totals, logs = _by_way(self.way, how, given)
        return out, quotient.log_divisor(totals, logs) if quotient.positive else None, State()


# --- with a backward of its own ------------------------------------------------------------------


def _by_way(
    way: Way, how: Summing, given: Given
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The outputs, the sums of weights and their frames, with gradients."""
    if unseen(*given.tensors):
        return way.outputs(how, given)[:3]
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    found = _ByWay.apply(way, how, given.frame, *given.tensors)  # type: ignore[no-untyped-call]
    return *found[:2], None if found[2] is None else found[2].detach()


class _ByWay(Function):
    """A way, and blocks by autograd for derivatives of the derivative."""

    @staticmethod
    def forward(ctx, way, how, frame, *tensors):  # type: ignore[no-untyped-def]
        out, totals, logs, ctx.kept = way.outputs(how, given_of(frame, tensors))
        ctx.way, ctx.how, ctx.frame = way, how, frame
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, out, totals)
        return out, totals, logs

    @staticmethod
    def backward(ctx, grad, of_totals, _):  # type: ignore[no-untyped-def]
        *tensors, out, totals = ctx.saved_tensors
        if torch.is_grad_enabled():

            def run(*tensors):  # type: ignore[no-untyped-def]
                def finish(sums, logs):  # type: ignore[no-untyped-def]
                    return ctx.how.quotient.of(sums, logs), sums[..., -1]

                return summed(ctx.how, given_of(ctx.frame, tensors), State(), finish)[:2]

            asks = [x.requires_grad for x in tensors]
            return None, None, None, *derivatives(run, tensors, asks, [grad, of_totals])
        grads = torch.zeros_like(out) if grad is None else grad, of_totals
        found = out, totals, ctx.kept
        into = ctx.way.gradients(ctx.how, given_of(ctx.frame, tensors), found, grads)
        return None, None, None, *into.tensors


# --- the kernel of each mechanism ----------------------------------------------------------------


def feature_kernel(work: Work, heads: tuple[int, ...], device: torch.device) -> FeatureKernel:
    """Runs the mechanism of a work."""
    root = None if work.scale is None else math.sqrt(work.scale)
    map_: FeatureMap
    drawn: Favor | Rbf | Rfa
    match work.mechanism:
        case Linear() as declared:
            map_, quotient = Elementwise(declared.feature), quotient_of(declared)
            return FeatureKernel("linear", Summing(map_, work.causal, quotient))
        case Taylor(order=2):
            chunk = LIMITS.taylor_chunk
            how = Summing(SecondOrder(root), work.causal, Quotient(least=SMALL), chunk)
            return FeatureKernel("taylor", how)
        case Taylor():
            # unit rows that point away from each other weigh 0
            return FeatureKernel(
                "taylor", Summing(FirstOrder(), work.causal, Quotient(least=SMALL))
            )
        case Favor(kind=kind, features=count) as favor:
            map_ = RandomFeatures(kind, count, root)
            least = 0.0 if kind in ("positive", "hyperbolic") else SMALL
            quotient, orthogonal = Quotient(least=least, signed=kind == "trig"), favor.orthogonal
            drawn = favor
        case Rbf(features=count) as rbf:
            map_ = RandomFeatures("gaussian", count, 1 / rbf.sigma)
            drawn, quotient, orthogonal = rbf, Quotient(), True
        case _:
            drawn = rfa = cast(Rfa, work.mechanism)
            map_, orthogonal = UnitWaves(rfa.features), False
            quotient = Quotient(least=SMALL, floor=rfa.floor, signed=True)

    def draws(size: int, kind: torch.dtype, device: torch.device, draw: int) -> Tables:
        wanted = drawn.seed, work.layer, heads, draw, drawn.features, size, orthogonal
        return {"directions": directions(wanted, kind, device)}

    how = Summing(map_, work.causal, quotient)
    gate = gate_frames if isinstance(drawn, Rfa) and drawn.gated else None
    return FeatureKernel(drawn.name, how, by_head=True, draws=draws, gate=gate)


def quotient_of(declared: Linear) -> Quotient:
    """What its sums are divided by: weights of the identity may add up to 0 or below."""
    if declared.normalize == "none":
        return Quotient(divides=False)
    if declared.feature == "identity":
        return Quotient(least=SMALL, signed=True)
    return Quotient(added=SMALL)


def gate_frames(
    k: torch.Tensor, tables: Tables, padding: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
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


def _of_keys(how: Summing, given: Given) -> State:
    """The sums over the keys that are given, zeros where there is none."""
    found = absorbed(how, given, State())
    return State(no_sums(how, given)) if found.sums is None else found
