"""Mechanisms that mix positions by whole matrices, by their papers' formulas, one head at a time.

A position of padding is not a position of the sequence; where weights are learned for positions, it
stands there with the value 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """q [m, d] of the last of n positions, k [n, d], v [n, e], real bool [n], what is learned."""

    q: Tensor
    k: Tensor
    v: Tensor
    real: Tensor
    causal: bool
    learned: Mapping[str, Tensor]

    def products(self) -> Tensor:
        return self.q @ self.k.T / math.sqrt(self.q.shape[1])

    def last(self, rows: Tensor) -> Tensor:
        return rows[len(rows) - len(self.q) :]


def linformer(one: Head, a: Mapping[str, Any]) -> Tensor:
    n, rank, kind = len(one.k), a.get("rank", 256), a.get("projection", "linear")
    if not one.real.any():
        return one.q.new_zeros(len(one.q), one.v.shape[1])
    if kind in ("mean", "max"):
        keys, values = (_pooled(x[one.real], rank, kind) for x in (one.k, one.v))
    else:
        maps = [one.learned["keys"], one.learned.get("values", one.learned["keys"])]
        if kind == "conv":
            width = -(-a.get("max_length", 4096) // rank)
            count = -(-n // width)
            maps = [
                torch.kron(torch.eye(count, dtype=each.dtype), each[None])[:, :n] for each in maps
            ]
            read = torch.stack([x.any() for x in torch.split(one.real, width)])
            maps = [each[read] for each in maps]
        keys, values = (
            by[:, :n] @ torch.where(one.real[:, None], x, 0.0)
            for by, x in zip(maps, (one.k, one.v), strict=True)
        )
    return torch.softmax(one.q @ keys.T / math.sqrt(one.q.shape[1]), 1) @ values


def _pooled(x: Tensor, count: int, kind: str) -> Tensor:
    """Means or maxima of runs as long as one another, the last of them one position longer."""
    count = min(count, len(x))
    short, longer = divmod(len(x), count)
    runs = torch.split(x, [short] * (count - longer) + [short + 1] * longer)
    return torch.stack([run.mean(0) if kind == "mean" else run.amax(0) for run in runs])


def nystrom(one: Head, a: Mapping[str, Any]) -> Tensor:
    landmarks, scale = a.get("landmarks", 64), 1 / math.sqrt(one.q.shape[1])
    q, k, v = (x[one.real] for x in (one.q, one.k, one.v))
    out = one.q.new_zeros(len(one.q), one.v.shape[1])
    if len(k) == 0:
        return out
    if landmarks >= len(k):
        out = torch.softmax(one.q @ k.T * scale, 1) @ v
    else:
        few_q, few_k = (_pooled(x, landmarks, "mean") for x in (q, k))
        middle = torch.softmax(few_q @ few_k.T * scale, 1)
        z = middle.T / middle.sum(0).max() / middle.sum(1).max()
        eye = torch.eye(landmarks, dtype=z.dtype)
        for _ in range(a.get("iterations", 6)):
            x = middle @ z
            z = z @ (13 * eye - x @ (15 * eye - x @ (7 * eye - x))) / 4
        if a.get("iterations") == 0:
            z = torch.linalg.pinv(middle.double()).to(middle.dtype)
        rows = torch.softmax(one.q @ few_k.T * scale, 1)
        out = rows @ z @ torch.softmax(few_q @ k.T * scale, 1) @ v
    if a.get("conv"):
        kernel, v = one.learned["kernel"], torch.where(one.real[:, None], one.v, 0.0)
        taps = torch.arange(len(v))[:, None] + torch.arange(len(kernel)) - len(kernel) // 2
        inside = (taps >= 0) & (taps < len(v))
        near = torch.where(inside[..., None], v[taps.clamp(0, len(v) - 1)], 0.0)
        out = out + (kernel[:, None] * near).sum(1)
    return out


def synthesizer(one: Head, a: Mapping[str, Any]) -> Tensor:
    n, learned, kind = len(one.k), one.learned, a.get("kind", "dense")

    def network(x: Tensor, *at: int) -> Tensor:
        inner: Tensor = x @ learned["hidden"][at].T + learned["hidden_bias"][at]
        return torch.relu(inner)

    if kind == "dense":
        logits = network(one.q) @ learned["weight"].T + learned["bias"]
    elif kind == "random":
        logits = one.last(learned["logits"][:n])
    elif kind == "factorized_random":
        logits = one.last((learned["rows"] @ learned["columns"].T)[:n])
    else:
        short = math.ceil(math.sqrt(a["max_length"]))
        weight, bias = learned["weight"], learned["bias"]
        fast = network(one.q, 0) @ weight[:short].T + bias[:short]
        slow = network(one.q, 1) @ weight[short:].T + bias[short:]
        at = torch.arange(n)
        logits = fast[:, at % short] * slow[:, at // short]
    logits = logits[:, :n]
    if a.get("products"):
        share = torch.sigmoid(learned["mix"])
        logits = (1 - share) * one.products() + share * logits
    held = one.real.expand(n, n)
    held = one.last(held.tril() if one.causal else held)
    some = held.any(1, keepdim=True)
    weights = torch.softmax(logits.masked_fill(~held & some, -math.inf), 1)
    return torch.where(held, weights, 0.0) @ one.v


def mixer(one: Head, a: Mapping[str, Any]) -> Tensor:
    n, learned = len(one.v), one.learned
    x = _normal(one)
    inner = learned["inner"][:, :n] @ x + learned["inner_bias"][:, None]
    inner = inner * (1 + torch.erf(inner / math.sqrt(2))) / 2
    return one.last(one.v + learned["outer"][:n] @ inner + learned["outer_bias"][:n, None])


def gmlp(one: Head, a: Mapping[str, Any]) -> Tensor:
    n = len(one.v)
    weight = one.learned["weight"][:n, :n]
    gate = (weight.tril() if one.causal else weight) @ _normal(one)
    return one.q * one.last(gate + one.learned["bias"][:n, None])


def _normal(one: Head) -> Tensor:
    """The values by the mean and the spread of their channels."""
    spread = torch.sqrt(one.v.var(1, correction=0, keepdim=True) + 1e-5)
    found = (one.v - one.v.mean(1, keepdim=True)) / spread
    found = found * one.learned["gain"] + one.learned["shift"]
    return torch.where(one.real[:, None], found, 0.0)


OUTPUTS: dict[str, Callable[[Head, Mapping[str, Any]], Tensor]] = {
    "linformer": linformer,
    "nystrom": nystrom,
    "synthesizer": synthesizer,
    "mixer": mixer,
    "gmlp": gmlp,
}
"""From one head and the arguments of the mechanism to its output [m, e]."""
