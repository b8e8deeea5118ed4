"""The kernel of all mechanisms whose weights are products of features.

Sources: Katharopoulos et al. 2020, "Transformers are RNNs", sections 3.2 and 3.3, of `linear`;
those of random and Taylor features in `maps`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from attnspec.backends.common.exact import repeated
from attnspec.backends.common.merging import Outputs, wide_type
from attnspec.backends.common.score_formula import widened
from attnspec.backends.factored.directions import directions
from attnspec.backends.factored.features.maps import Summing, Tables
from attnspec.backends.factored.features.sums import Given, State, Weighed
from attnspec.backends.factored.softmax import check_no_dropout
from attnspec.ir.mechanisms.favor import Favor
from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.ir.mechanisms.rfa import Rfa
from attnspec.lower.work import Call, Heads


@dataclass(frozen=True, eq=False)
class FeatureKernel(Summing):
    """Runs a mechanism, whose features are summed as `how` says.

    Where features are drawn, every query head has some of its own, also of the key head that it
    shares with others.
    """

    heads: Heads

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        return self.partial(q, k, v, call)[0]

    def partial(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Outputs:
        """The output and the logarithms [B, H, n_q] of what its rows are divided by, None where
        that may be negative or is nothing."""
        return by_head(q, self.outputs(self.given(q, k, v, call)))

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, state: object, with_lse: bool = False
    ) -> tuple[Outputs, object]:
        """The same of the causal sums of more positions, on top of those that `state` holds, None
        at first, and the state after them."""
        sums, after = self.given(q, k, v, call).summed(cast("State | None", state))
        return by_head(q, self.worth(sums)), after

    def onward(self, q: Tensor, k: Tensor, v: Tensor, call: Call, before: State) -> Tensor:
        """The outputs of queries on top of the sums over keys elsewhere: those before all of these
        positions where it is causal, else those over all keys, these among them."""
        if not self.work.causal:
            k, v, call = k[:, :, :0], v[:, :, :0], replace(call, padding=None)
        before = before._replace(sums=before.sums.mT)
        sums, _ = self.given(q, k, v, call).summed(before)
        return by_head(q, self.worth(sums))[0]

    def key_sums(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, at: Tensor
    ) -> tuple[State, Tensor | None]:
        """The sums over these keys [N, m, e], wherever they are; q says heads and types alone. Of a
        gate they are as they stand after the last key, with the logarithms of what it leaves of
        sums before, [N]."""
        request = self.given(q[:, :, :0], k, v, call)
        _, state = request.summed()
        if not request.gate:
            return state._replace(sums=state.sums.mT), None
        last = request.gate[1][:, -1:].sum(1)
        # the frame of the state is this one, as a constant
        left = torch.exp(last.detach() - last).to(request.kind)
        return State(state.sums.mT * left[:, None, None]), -last.to(request.kind)

    def given(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Given:
        """What is summed: heads beside the key head that they read, and what features are of."""
        (batch, heads, rows, size), declared = q.shape, self.declared
        check_no_dropout(declared.name, call.dropout_p)
        kind, padding = wide_type(q), call.padding
        tables = {part.name: call.tables[part.name].to(kind) for part in declared.parts()}
        gate: tuple[Tensor, ...] = ()
        if isinstance(declared, Favor | Rbf | Rfa):
            # drawn anew every so many calls in training, never where that is 0
            redraw, (calls, asked) = getattr(declared, "redraw", 0), call.draws
            draw = calls // redraw + asked if redraw else 0
            tables["directions"] = directions(declared, self.work.layer, self.heads, draw, q)
            k, v = repeated(k, heads), repeated(v, heads)
            if getattr(declared, "gated", False):
                gate = gate_frames(k, tables, padding)
        count = k.shape[1]
        of_lines = {
            name: x.expand(batch, count, *x.shape[1:]).flatten(0, 1) for name, x in tables.items()
        }
        real = None if padding is None else padding.repeat_interleave(count, 0)
        q = q.reshape(batch * count, heads // count, rows, size)
        k, v, *frames = (x.flatten(0, 1) for x in (k, v, *gate))
        return Given(q, k, v, real, tuple(frames), of_lines, self)

    def sums(self, given: Given) -> Weighed:
        """The sums of all queries before they are divided, with their frames."""
        return given.summed()[0]

    def outputs(self, given: Given) -> Outputs:
        """What these are worth, as `worth` has it."""
        return given.worth()


def by_head(q: Tensor, outputs: Outputs) -> Outputs:
    """What lines of key heads give, as `partial` of q has it."""
    (out, lse), shape = outputs, q.shape[:3]
    return out.to(q.dtype).view(*shape, out.shape[-1]), None if lse is None else lse.view(shape)


def gate_frames(k: Tensor, tables: Tables, padding: Tensor | None) -> tuple[Tensor, Tensor]:
    """Frames t, r [B, H, n] in float64 of sums S_i = g_i S_(i-1) + (1 - g_i) f_i: a key j weighs
    exp(t_j - r_i) = (1 - g_j) g_(j+1) ... g_i, with g = sigmoid(gate . k + gate_bias).

    Padding passes the sums on as they are.
    """
    logits = (widened(k) * tables["gate"][:, None]).sum(-1)
    logits = (logits + tables["gate_bias"][:, None]).double()
    kept = functional.logsigmoid(logits)
    if padding is not None:
        kept = kept.masked_fill(~padding[:, None], 0.0)
    rows = -kept.cumsum(-1)
    return functional.logsigmoid(-logits) + rows, rows
