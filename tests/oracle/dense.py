"""Attention by the definition: every pair written out, one head at a time, differentiable.

Formulas and conventions are those of the language's contract; in float64 this is the reference, in
float32 it says how exact a dense formula is.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracle import decided, drawn
from oracle.matrices import OUTPUTS, Head
from oracle.meaning import Slot, mask, slot
from oracle.scalars import Place, place_of, scalar
from oracle.tree import Attention, Node


@dataclass(frozen=True)
class Call:
    """One call: q [B, H, n_q, d], k [B, H_kv, n_k, d], v [B, H_kv, n_k, e], padding bool [B, n_k],
    the inputs of each sample, by the number of buckets a learned table [layers, heads, buckets],
    and by its name, as `linformer_keys`, what a mechanism learns, [layers or 1, heads or 1, …]."""

    q: Tensor
    k: Tensor
    v: Tensor
    layer: int
    padding: np.ndarray | None
    inputs: list[dict[str, Any]]
    tables: Mapping[int, Tensor]
    learned: Mapping[str, Tensor] = field(default_factory=dict)

    def real(self, b: int) -> np.ndarray:
        return np.ones(self.k.shape[2], bool) if self.padding is None else self.padding[b]

    def sample(self, b: int, causal: bool, scale: float) -> decided.Sample:
        """What one sample decides by."""
        q, k = (x[b].detach().double().numpy() for x in (self.q, self.k))
        group, real = len(q) // len(k), self.real(b).tolist()
        wide = k.repeat(group, 0)
        return decided.Sample(q, wide, real, causal, scale, group, self.learned)

    def learned_by(self, mechanism: str, layer: int, head: int) -> dict[str, Tensor]:
        """What a layer and head of a mechanism has learned, by the part of its name."""
        found = {}
        for name, x in self.learned.items():
            called, _, part = name.partition("_")
            if called == mechanism:
                by_layer = x[layer if len(x) > 1 else 0]
                found[part] = by_layer[head if len(by_layer) > 1 else 0]
        return found


def attend_with_lse(spec: Attention, call: Call) -> tuple[Tensor, Tensor]:
    """[B, H, n_q, e], and the log-sum-exps [B, H, n_q], NaN where the weights have none."""
    batch, heads, asked, _ = call.q.shape
    if call.k.shape[2] == 0:
        none = call.q.new_full((batch, heads, asked), -math.inf)
        return call.q.new_zeros(batch, heads, asked, call.v.shape[-1]), none
    group = heads // call.k.shape[1]
    outs, sums = [], []
    for b in range(batch):
        for head in range(heads):
            keys = call.k[b, head // group], call.v[b, head // group]
            out, lse = _head(spec, call, b, head, keys)
            outs.append(out)
            sums.append(call.q.new_full((asked,), math.nan) if lse is None else lse)
    shape = batch, heads, asked
    return torch.stack(outs).view(*shape, call.v.shape[-1]), torch.stack(sums).view(shape)


def _head(
    spec: Attention, call: Call, b: int, head: int, keys: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor | None]:
    k, v = keys
    q, n = call.q[b, head], len(k)
    asked = head if spec.heads is not None else 0
    does = slot(spec, call.layer if spec.layers is not None else 0, asked)
    # without a declared count, patterns of all heads are those of the first, but for their draws
    at = place_of(spec, n, call.layer, head, call.inputs[b])
    real = call.real(b)
    kept = torch.from_numpy(real)
    mechanism = does.attend.nodes[-1] if does.attend.kind == "g+" else does.attend
    learned = call.learned_by(str(mechanism.parts[0]), call.layer, head)
    one = Head(q, k, v, kept, spec.causal, learned)
    if does.attend.kind == "mechanism":
        return _mechanism(mechanism, at, one)
    if decided.is_decided(does.attend):
        at = replace(at, sample=call.sample(b, spec.causal, _scale(does, at, q)))
    pairs = mask(spec, n, call.layer, head, call.inputs[b], at.sample)
    held = torch.from_numpy(pairs & real)[n - len(q) :]
    if at.sample is not None and does.attend.kind != "g+" and kept.any():
        return _decided(does, at, held, q, k, v, call, head)
    scores = _scores(does, at, q, k, call, head, held)
    # a score may hide a pair
    held = held & (scores > -math.inf)
    scores = torch.where(scores > -math.inf, scores, 0.0)
    if does.attend.kind == "g+":
        return _hybrid(mechanism, at, held, scores, one)
    return weights(scores, held, does.normalize) @ v, log_sum_exp(scores, held, does.normalize)


def _scale(does: Slot, at: Place, q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[-1]) if does.scale is None else float(scalar(does.scale, at))


def _decided(
    does: Slot,
    at: Place,
    held: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    head: int,
) -> tuple[Tensor, Tensor | None]:
    """Under data-dependent pairs, some of which change what they weigh."""
    first, factor, how = len(k) - len(q), torch.ones(len(k), dtype=q.dtype), does.normalize
    leaf = next(
        (x for x in does.attend.walk() if x.parts[0] in ("lsh", "cluster", "sinkhorn")), None
    )
    a = {} if leaf is None else decided.options(leaf, at)
    if leaf is not None and leaf.parts[0] == "lsh" and a["share_qk"]:
        size = k.norm(dim=1, keepdim=True)
        k = k / torch.where(size > 0, size, 1.0)
        k = k * math.sqrt(q.shape[1]) if a["scale"] == "unit" else k
    elif a.get("of") == "q":
        labels = torch.from_numpy(decided.query_clusters(a, at))
        same = (labels[:, None] == labels).to(q.dtype)
        q = same @ q / same.sum(1, keepdim=True)
    elif leaf is not None and leaf.parts[0] == "sinkhorn":
        factor = decided.factors(a, at, k)[first:]
    scores = _scores(does, at, q, k, call, head, held, factor)
    if leaf is not None and (a.get("multiplicity") or a.get("combine") == "mean"):
        rounds = torch.zeros(len(decided.lsh_rounds(leaf, at)), *held.shape, dtype=torch.bool)
        for turn, pairs in enumerate(decided.lsh_rounds(leaf, at)):
            for query, key in pairs:
                rounds[turn, query - first, key] = held[query - first, key]
        if a["combine"] == "mean":
            each = torch.stack([weights(scores, one, how) for one in rounds])
            return each.sum(0) / rounds.any(2).sum(0)[:, None].clamp_min(1) @ v, None
        scores = scores + rounds.sum(0).clamp_min(1).double().log().to(scores.dtype)
    return (weights(scores, held, how) * factor) @ v, log_sum_exp(scores, held, how)


def _scores(
    does: Slot,
    at: Place,
    q: Tensor,
    k: Tensor,
    call: Call,
    head: int,
    held: Tensor,
    factor: Tensor | float = 1.0,
) -> Tensor:
    scores = q @ k.T * _scale(does, at, q) * factor
    n = len(k)
    distance = torch.arange(n - len(q), n)[:, None] - torch.arange(n)
    for change in does.scores:
        match change.parts[0]:
            case "expression":
                # beside pairs it may be no number, nor its gradient
                some = torch.where(held, scores, 0.0)
                value = expressed(change.nodes[0].nodes[0], at, some)
                scores = torch.zeros_like(scores) + value.to(scores.dtype)
            case "softcap":
                cap = float(scalar(change.nodes[0].nodes[0], at))
                scores = cap * torch.tanh(scores / cap)
            case "alibi":
                heads = at.spec.heads or call.q.shape[1]
                slopes = change.nodes[0].parts if change.nodes else ()
                slope = float(slopes[head]) if slopes else papers_slope(head, heads)  # type: ignore[arg-type]
                scores = scores - slope * distance.abs().to(q.dtype)
            case _:
                sizes = [int(scalar(each.nodes[0], at)) for each in change.nodes]
                table = call.tables[sizes[0]]
                row = table[at.layer if len(table) > 1 else 0][head]
                scores = scores + row[buckets(distance, sizes[0], sizes[1], not at.spec.causal)]
    return scores


def expressed(node: Node, at: Place, scores: Tensor) -> Tensor:
    """What an expression of scores [n_q, n] is worth, float64 for all that does not read them."""
    if node.kind == "name":
        return _symbol(str(node.parts[0]), at, scores)
    if node.kind == "number":
        return torch.tensor(float(node.parts[0]), dtype=torch.float64)  # type: ignore[arg-type]
    x, *more = (expressed(each, at, scores).to(torch.float64) for each in node.nodes)
    operation = str(node.parts[0]) if node.kind == "call" else node.kind
    if operation == "item":
        return torch.stack([torch.broadcast_to(each, x.shape) for each in more]).gather(
            # outside a list only where no pair is
            0,
            x.long().clamp(0, len(more) - 1)[None],
        )[0]
    found: Tensor = _EXPRESSED[operation](x, *more)
    return found.to(torch.float64)


_EXPRESSED: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": lambda a, b: torch.floor(a / b),
    "%": torch.remainder,
    "**": torch.pow,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "and": lambda a, b: (a != 0) & (b != 0),
    "or": lambda a, b: (a != 0) | (b != 0),
    "not": lambda a: a == 0,
    "in_range": lambda x, low, high: (x >= low) & (x <= high),
    "in_set": lambda x, *some: torch.stack([x == each for each in some]).any(0),
    "min": lambda *some: functools.reduce(torch.minimum, some),
    "max": lambda *some: functools.reduce(torch.maximum, some),
    **{
        name: getattr(torch, name)
        for name in ("abs", "sqrt", "log2", "floor", "ceil", "tanh", "exp", "log")
    },
    "isqrt": lambda x: torch.floor(torch.sqrt(x)),
}


def _symbol(called: str, at: Place, scores: Tensor) -> Tensor:
    n_q, n = scores.shape
    queries, keys = torch.arange(n - n_q, n), torch.arange(n)
    if called == "s":
        return scores
    if called in ("q", "k"):
        return queries[:, None] if called == "q" else keys
    if called.endswith("(q, k)"):
        values = torch.as_tensor(at.given(called.partition("(")[0]))
        return values[at.head if len(values) > 1 else 0][-n_q:] if n_q else values[0][:0]
    if called.endswith(")"):
        name, side = called[:-1].split("(")
        values = torch.as_tensor(np.asarray(at.given(name)))
        return values if not side else values[queries][:, None] if side == "q" else values
    return torch.tensor(float(scalar(Node("name", (called,)), at)), dtype=torch.float64)


def papers_slope(head: int, heads: int) -> float:
    """ALiBi's: of the power of two at or below `heads`, then every other one of twice as many."""
    power = 2 ** math.floor(math.log2(heads))
    if head < power:
        return float(2 ** (-8 * (head + 1) / power))
    return papers_slope(2 * (head - power), 2 * power)


def buckets(distance: Tensor, size: int, far: int, two_sided: bool) -> Tensor:
    """The bucket of each q - k: T5's, with the boundaries of the logarithm decided exactly."""

    def one(x: int) -> int:
        side = size // 2 if two_sided else size
        later = side if two_sided and x < 0 else 0
        x = abs(x) if two_sided else max(x, 0)
        exact = side // 2
        if x < exact:
            return later + x
        if exact == 0:
            return later
        wide, step = side - exact, 0
        # x / exact >= (far / exact) ** (step / wide)
        while step + 1 < wide and x**wide * exact ** (step + 1) >= far ** (step + 1) * exact**wide:
            step += 1
        return later + exact + step

    every, where = torch.unique(distance, return_inverse=True)
    return torch.tensor([one(x) for x in every.tolist()], dtype=torch.long)[where]


def log_sum_exp(scores: Tensor, held: Tensor, normalize: str) -> Tensor | None:
    """The logarithm of what a query's weights are divided by, -inf for nothing."""
    if normalize not in ("softmax", "softmax1"):
        return None
    if normalize == "softmax1":
        scores = torch.cat([scores, torch.zeros_like(scores[:, :1])], 1)
        held = torch.cat([held, torch.ones_like(held[:, :1])], 1)
    return torch.logsumexp(torch.where(held, scores, -math.inf), -1)


def weights(scores: Tensor, held: Tensor, normalize: str) -> Tensor:
    """Of a query's keys; a query without any weighs nothing."""
    if normalize == "sigmoid":
        return torch.where(held, torch.sigmoid(scores), 0.0)
    if normalize == "relu":
        raw = torch.where(held, torch.relu(scores), 0.0)
    else:
        scores = torch.where(held, scores, -math.inf)
        least = 0.0 if normalize == "softmax1" else torch.finfo(scores.dtype).min
        top = scores.detach().amax(-1, keepdim=True).clamp(min=least)
        raw = torch.exp(scores - top)
        if normalize == "softmax1":
            return raw / (raw.sum(-1, keepdim=True) + torch.exp(-top))
    total = raw.sum(-1, keepdim=True)
    return raw / torch.where(total > 0, total, 1.0)


# --- mechanisms --------------------------------------------------------------------------------

_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu1": lambda x: torch.where(x > 0, x + 1, torch.exp(x.clamp(max=0.0))),
    "relu": lambda x: x.clamp(min=0.0),
    "squared_relu": lambda x: x.clamp(min=0.0) ** 2,
    "exp": torch.exp,
    "identity": lambda x: x,
}


def _options(node: Node, at: Place) -> dict[str, Any]:
    found = {}
    for each in node.nodes:
        value = each.nodes[0]
        known = value.kind == "name" and value.parts[0] not in at.names
        found[str(each.parts[0])] = value.parts[0] if known else scalar(value, at)
    return found


def _kernel(node: Node, at: Place, one: Head) -> Tensor:
    """The weights of all pairs, before any is left out or divided."""
    (q, k), a, size = (one.q, one.k), _options(node, at), one.q.shape[-1]
    if node.parts[0] == "linear":
        feature = _MAPS[a.get("feature", "elu1")]
        products: Tensor = feature(q) @ feature(k).T
        return products
    if node.parts[0] == "taylor":
        if a.get("order", 1) == 1:
            units = [x / x.norm(dim=1, keepdim=True) for x in (q, k)]
            first: Tensor = 1 + units[0] @ units[1].T
            return first
        s = q @ k.T / math.sqrt(size)
        second: Tensor = 1 + s + s * s / 2
        return second
    w = _rows({"orthogonal": node.parts[0] != "rfa", **a}, at, size).to(q.dtype)
    if node.parts[0] == "rfa":
        q, k = (x / x.norm(dim=1, keepdim=True) for x in (q, k))
        return _waves(q, k, w * one.learned["spread"]) * (_left(one) if a.get("gated") else 1.0)
    q, k = q * size**-0.25, k * size**-0.25
    if a.get("kind") == "trig":
        return torch.exp(((q * q).sum(1)[:, None] + (k * k).sum(1)) / 2) * _waves(q, k, w)
    halves: Tensor = torch.relu(q @ w.T) @ torch.relu(k @ w.T).T / len(w)
    return halves


def _waves(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """The means over the random rows w of the cosines of w (q - k), for all pairs."""
    return torch.cos((q @ w.T)[:, None] - (k @ w.T)[None]).mean(-1)


def _left(one: Head) -> Tensor:
    """What the gates behind each key, up to a query's own, leave of it."""
    gate = torch.sigmoid(one.k @ one.learned["gate"] + one.learned["gate_bias"])
    gate = torch.where(one.real, gate, 1.0)
    behind = torch.ones(len(gate), len(gate), dtype=torch.bool).triu(1)
    return one.last(torch.where(behind, gate, 1.0).cumprod(1).T * (1 - gate))


def _logarithms(node: Node, at: Place, q: Tensor, k: Tensor) -> Tensor | None:
    """The logarithms of weights of exponentials, which may be too small, or None for another."""
    a, size = _options(node, at), q.shape[-1]
    kind = a.get("kind", "positive")
    if node.parts[0] not in ("favor", "rbf") or kind in ("relu", "trig"):
        return None
    w = _rows(a, at, size).to(q.dtype)
    if node.parts[0] == "rbf":
        q, k, half = q / a.get("sigma", 1.0), k / a.get("sigma", 1.0), 1.0
    else:
        q, k, half = q * size**-0.25, k * size**-0.25, 0.5
    w = torch.cat([w, -w]) if kind == "hyperbolic" else w
    sides = [x @ w.T - half * (x * x).sum(1, keepdim=True) for x in (q, k)]
    return torch.logsumexp(sides[0][:, None] + sides[1][None], -1) - math.log(len(w))


def _rows(a: dict[str, Any], at: Place, size: int) -> Tensor:
    """The random rows of a mechanism [m, size]."""
    given = a.get("seed", 0), at.layer, at.head, a.get("features", 256), size
    return torch.from_numpy(drawn.directions(*given, bool(a.get("orthogonal", True))))


def _mechanism(node: Node, at: Place, one: Head) -> tuple[Tensor, Tensor | None]:
    """The outputs, and the logarithms of what they are divided by."""
    a, (q, k, v, real) = _options(node, at), (one.q, one.k, one.v, one.real)
    if node.parts[0] in OUTPUTS:
        return OUTPUTS[str(node.parts[0])](one, a), None
    if node.parts[0] == "fourier":
        # padding counts as zeros
        given = torch.where(real[:, None], v, 0.0).to(torch.promote_types(v.dtype, torch.float32))
        waves: Tensor = torch.fft.fft(torch.fft.fft(given, dim=1), dim=0).real
        return one.last(waves).to(v.dtype), None
    if node.parts[0] == "efficient":
        if a.get("normalize") == "scaling":
            found = q @ k.T / real.sum().clamp(min=1)
        else:
            keys = torch.where(real[:, None], k, -math.inf)
            found = torch.softmax(q, 1) @ (torch.softmax(keys, 0) if real.any() else 0 * k).T
        return torch.where(real, found, 0.0) @ v, None
    allowed = _allowed(at, len(q), len(k)) & real
    logarithms = _logarithms(node, at, q, k)
    if logarithms is not None:
        out = weights(logarithms, allowed, "softmax") @ v
        return out, log_sum_exp(logarithms, allowed, "softmax")
    raw = torch.where(allowed, _kernel(node, at, one), 0.0)
    total = raw.sum(1, keepdim=True)
    if a.get("normalize") == "none":
        return raw @ v, None
    if node.parts[0] == "linear" and a.get("feature") != "identity":
        return (raw / (total + 1e-6)) @ v, _log(total, 1e-6)
    if a.get("floor"):
        return raw / total.clamp(min=a["floor"]) @ v, None
    # weights may have either sign
    away = torch.where(total < 0, total.clamp(max=-1e-6), total.clamp(min=1e-6))
    return raw / away @ v, _log(total)


def _log(total: Tensor, more: float = 0.0) -> Tensor:
    """The logarithm of sums [n_q, 1], -inf for those of nothing."""
    some = total > 0
    return torch.where(some, torch.log(torch.where(some, total + more, 1.0)), -math.inf)[:, 0]


def _hybrid(
    node: Node, at: Place, held: Tensor, scores: Tensor, one: Head
) -> tuple[Tensor, Tensor | None]:
    allowed = _allowed(at, len(one.q), len(one.k)) & one.real
    logarithms = _logarithms(node, at, one.q, one.k)
    if logarithms is not None:
        mixed = torch.where(held, scores, logarithms)
        return weights(mixed, allowed, "softmax") @ one.v, log_sum_exp(mixed, allowed, "softmax")
    raw = torch.where(held, torch.exp(scores), _kernel(node, at, one))
    raw = torch.where(allowed, raw, 0.0)
    total = raw.sum(1, keepdim=True)
    return raw / torch.where(total == 0, 1.0, total) @ one.v, _log(total)


def _allowed(at: Place, rows: int, n: int) -> Tensor:
    every = torch.ones(n, n, dtype=torch.bool)
    return (every.tril() if at.spec.causal else every)[n - rows :]
