"""What the data decide, in plain loops and float64, straight from the language: one sample and head
at a time. Positions are lists of numbers, pairs are sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Pairs = set[tuple[int, int]]
Graph = Callable[[int, int], bool]


@dataclass
class Sample:
    """One sample: the queries of all heads [H, n_q, d] that are the last of n keys [H, n, d], keys
    repeated for each head, and which keys are real."""

    q: np.ndarray
    k: np.ndarray
    real: Sequence[bool]
    causal: bool
    scale: float

    @property
    def n(self) -> int:
        return int(self.k.shape[1])

    @property
    def n_q(self) -> int:
        return int(self.q.shape[1])


@dataclass
class TopK:
    """The arguments of `topk`, as they are after their defaults."""

    size: int
    queries: int
    score: str
    rule: str
    amount: float
    always: Graph | None = None
    within: Graph | None = None
    given: np.ndarray | None = None


def topk(sample: Sample, heads: Sequence[int], one: TopK) -> Pairs:
    """The pairs of heads that share their scores, which have one choice."""
    real = [i for i in range(sample.n) if sample.real[i]]
    if not real:
        return set()
    start = real[0]
    rows: dict[int, list[int]] = {}
    for q in range(max(start, sample.n - sample.n_q), sample.n):
        rows.setdefault((q - start) // one.queries, []).append(q)
    first, found = min(rows, default=0), set()
    for number, every in rows.items():
        own = [q for q in every if sample.real[q]]
        if not own:
            continue
        for block in chosen_blocks(sample, heads, one, own, start, number - first):
            for q in every:
                for k in range(start + block * one.size, start + (block + 1) * one.size):
                    inside = k < sample.n and sample.real[k]
                    if inside and (one.within is None or one.within(q, k)):
                        found.add((q, k))
    return {(q, k) for q, k in found if not sample.causal or k <= q}


def chosen_blocks(
    sample: Sample, heads: Sequence[int], one: TopK, own: list[int], start: int, row: int
) -> list[int]:
    count = -(-(sample.n - start) // one.size)
    seen = [
        [
            k
            for k in range(start + j * one.size, min(sample.n, start + (j + 1) * one.size))
            if sample.real[k]
            and (not sample.causal or k <= own[0])
            and (one.within is None or any(one.within(q, k) for q in own))
        ]
        for j in range(count)
    ]
    each = [scores(sample, head, one, own, seen, row) for head in heads]
    mean = [sum(values) / len(heads) for values in zip(*each, strict=True)]
    forced = [j for j in range(count) if is_forced(sample, one, own, start, j)]
    candidates = [
        j
        for j in range(count)
        if j not in forced
        and mean[j] != -math.inf
        and (not sample.causal or one.size == 1 or start + (j + 1) * one.size - 1 <= own[0])
    ]
    candidates.sort(key=lambda j: (math.isnan(mean[j]), 0 if math.isnan(mean[j]) else -mean[j], j))
    if one.rule == "above":
        return forced + [j for j in candidates if mean[j] > one.amount]
    if one.rule == "count":
        return forced + candidates[: max(0, int(one.amount) - len(forced))]
    if one.amount >= 1:
        return forced + candidates
    weights = masses(sample, one, mean, forced + candidates)
    taken, total = list(forced), sum(weights[j] for j in forced)
    for j in candidates:
        if total >= one.amount:
            break
        taken.append(j)
        total += weights[j]
    return taken


def masses(sample: Sample, one: TopK, mean: list[float], those: list[int]) -> dict[int, float]:
    if one.score == "mass":
        return {j: max(0.0, mean[j]) for j in those}
    scale = 1.0 if one.given is not None else sample.scale
    logits = {j: -math.inf if math.isnan(mean[j]) else mean[j] * scale for j in those}
    top = max(logits.values(), default=-math.inf)
    raw = {j: math.exp(x - top) if top > -math.inf else 0.0 for j, x in logits.items()}
    return {j: x / (sum(raw.values()) or 1.0) for j, x in raw.items()}


def scores(
    sample: Sample, head: int, one: TopK, own: list[int], seen: list[list[int]], row: int
) -> list[float]:
    at = [q - (sample.n - sample.n_q) for q in own]
    mean = sample.q[head, at].mean(0)
    dots = {k: float(mean @ sample.k[head, k]) for keys in seen for k in keys}
    top = max((x for x in dots.values() if not math.isnan(x)), default=0.0)
    raw = {k: 0.0 if math.isnan(x) else math.exp((x - top) * sample.scale) for k, x in dots.items()}
    total = sum(raw.values()) or 1.0
    found = []
    for j, keys in enumerate(seen):
        if not keys:
            found.append(-math.inf)
        elif one.given is not None:
            found.append(float(one.given[head, row, j]))
        elif one.score in ("dot", "max"):
            found.append(float(np.max([dots[k] for k in keys])))
        elif one.score == "mean":
            found.append(float(mean @ sample.k[head, keys].mean(0)))
        elif one.score == "bound":
            low, high = sample.k[head, keys].min(0), sample.k[head, keys].max(0)
            found.append(float(np.maximum(mean * low, mean * high).sum()))
        else:
            found.append(sum(raw[k] for k in keys) / total)
    return found


def is_forced(sample: Sample, one: TopK, own: list[int], start: int, block: int) -> bool:
    keys = range(start + block * one.size, min(sample.n, start + (block + 1) * one.size))
    if one.always is not None:
        return any(
            one.always(q, k) and sample.real[k] and (not sample.causal or k <= q)
            for q in own
            for k in keys
        )
    return sample.causal and one.size > 1 and any(q in keys for q in own)


def lsh(
    buckets: np.ndarray, sample: Sample, chunk: int, look: int, cut: str, masked: bool, shared: bool
) -> tuple[Pairs, list[Pairs]]:
    """The pairs for buckets [R, n], and those of each round."""
    rounds: list[Pairs] = []
    for labels in buckets.tolist():
        order = sorted((i for i in range(sample.n) if sample.real[i]), key=lambda i: (labels[i], i))
        where: dict[int, int] = {}
        inside: dict[int, int] = {}
        for slot, i in enumerate(order):
            count = inside.get(labels[i], 0)
            where[i] = (slot if cut == "order" else count) // chunk
            inside[labels[i]] = count + 1
        rounds.append(
            {
                (q, k)
                for q in order
                for k in order
                if q >= sample.n - sample.n_q
                and (not sample.causal or k <= q)
                and 0 <= where[q] - where[k] <= look
                and (not masked or labels[q] == labels[k])
            }
        )
    found = set().union(*rounds)
    if shared:
        others = {q for q, k in found if q != k}
        found = {(q, k) for q, k in found if q != k or q not in others}
    return found, [pairs & found for pairs in rounds]


def nearest(points: np.ndarray, centroids: np.ndarray) -> list[int]:
    near = points @ centroids.T
    return [0 if not x.any() else int(np.argmax(y)) for x, y in zip(points, near, strict=True)]


def unit(x: np.ndarray) -> np.ndarray:
    size = np.linalg.norm(x, axis=-1, keepdims=True)
    return np.where(size > 0, x / np.where(size > 0, size, 1), x)


def kmeans(points: np.ndarray, first: np.ndarray) -> list[int]:
    """Ten rounds from centroids that are drawn already."""
    points, centroids = unit(points), unit(first)
    for _ in range(10):
        labels = nearest(points, centroids)
        for j in range(len(centroids)):
            total = sum((points[i] for i in range(len(points)) if labels[i] == j), np.zeros(1))
            if np.any(total):
                centroids[j] = unit(total)
    return nearest(points, centroids)


def sinkhorn(
    k: np.ndarray,
    real: Sequence[bool],
    sort: np.ndarray,
    size: int,
    turns: int,
    temperature: float,
    causal: bool,
) -> tuple[np.ndarray, list[int]]:
    """The balanced matrix, and the block that is matched with each, -1 for none."""
    start = list(real).index(True)
    count = -(-(len(k) - start) // size)
    sums, some = np.zeros((count, k.shape[1])), np.zeros(count, bool)
    for j in range(count):
        for i in range(start, len(k)):
            block = (i - start) // size
            some[j] |= real[i] and block == j
            counted = block < j or i == start + j * size if causal else block == j
            if real[i] and counted:
                sums[j] += k[i]
    logits = sums @ sort[:, :count] / temperature
    allowed = some[:, None] & some[None]
    if causal:
        allowed &= np.tri(count, k=-1, dtype=bool)
    raw = np.where(allowed, np.exp(logits - logits.max()), 0.0)
    for _ in range(turns):
        raw = raw / np.where(raw.sum(1) > 0, raw.sum(1), 1)[:, None]
        total = raw.cumsum(0) if causal else raw.sum(0)
        raw = raw / np.where(total > 0, total, 1)
    matched = [int(np.argmax(raw[i])) if allowed[i].any() else -1 for i in range(count)]
    return raw, matched
