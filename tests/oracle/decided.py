"""Data-dependent graphs, in plain loops and float64, straight from the language: one sample and
head at a time. Positions are lists of numbers, pairs are sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oracle.drawn import Draw, rotations
from oracle.scalars import Place, scalar
from oracle.tree import Node

Pairs = set[tuple[int, int]]
Graph = Callable[[int, int], bool]


@dataclass
class Sample:
    """One sample: the queries of all heads [H, n_q, d] that are the last of n keys [H, n, d], keys
    repeated for each head, and which keys are real; how many heads share keys; what is learned
    or kept, [layers or 1, heads or 1, …], by its name."""

    q: np.ndarray
    k: np.ndarray
    real: Sequence[bool]
    causal: bool
    scale: float
    group: int = 1
    learned: Mapping[str, Tensor] = field(default_factory=dict)

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
    q_labels: np.ndarray,
    k_labels: np.ndarray,
    sample: Sample,
    chunk: int,
    look: int,
    cut: str,
    masked: bool,
    shared: bool,
) -> list[Pairs]:
    """The pairs of each round for buckets [R, n] of queries and of keys."""
    rounds: list[Pairs] = []
    for labels in zip(q_labels.tolist(), k_labels.tolist(), strict=True):
        (q_at, q_where), (k_at, k_where) = (_chunks(each, sample, chunk, cut) for each in labels)
        rounds.append(
            {
                (q, k)
                for q in q_at
                for k in k_at
                if q >= sample.n - sample.n_q
                and (not sample.causal or k <= q)
                and 0 <= q_where[q] - k_where[k] <= look
                and (not masked or labels[0][q] == labels[1][k])
            }
        )
    if not shared:
        return rounds
    others = {q for pairs in rounds for q, k in pairs if q != k}
    return [{(q, k) for q, k in pairs if q != k or q not in others} for pairs in rounds]


NOWHERE = np.iinfo(np.int64).min
"""The bucket of a query that is not there."""


def _chunks(
    labels: list[int], sample: Sample, chunk: int, cut: str
) -> tuple[list[int], dict[int, int]]:
    """The real positions by their buckets, and the chunk of each."""
    real = [i for i in range(sample.n) if sample.real[i] and labels[i] != NOWHERE]
    order = sorted(real, key=lambda i: (labels[i], i))
    where: dict[int, int] = {}
    inside: dict[int, int] = {}
    for slot, i in enumerate(order):
        count = inside.get(labels[i], 0)
        where[i] = (slot if cut == "order" else count) // chunk
        inside[labels[i]] = count + 1
    return order, where


def hashed(x: np.ndarray, a: Mapping[str, Any], count: int, at: Place) -> np.ndarray:
    """The bucket of every vector of x [n, d] in every round, [R, n]."""
    planes = a["hash"] == "hyperplanes"
    columns = count.bit_length() - 1 if planes else count // 2
    place = a["seed"], at.layer, at.head, a["rounds"], x.shape[1], columns
    y = x @ rotations(*place)
    if planes:
        return np.asarray(((y > 0) * 2 ** np.arange(columns)).sum(-1))
    return np.asarray(np.concatenate([y, -y], -1).argmax(-1))


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
    k: Tensor, real: Sequence[bool], sort: Tensor, a: Mapping[str, Any], causal: bool
) -> tuple[Tensor, list[int]]:
    """The balanced matrix of keys and a learned one [d, blocks], and each block's match or -1."""
    k, sort = k.double(), sort.double()
    start, size = list(real).index(True), a["size"]
    count = -(-(len(k) - start) // size)
    sums: list[Tensor] = []
    for j in range(count):
        last = start + j * size if causal else start + (j + 1) * size - 1
        first = start if causal else start + j * size
        those = [k[i] for i in range(first, min(len(k), last + 1)) if real[i]]
        sums.append(sum(those, torch.zeros_like(k[0])))
    some = torch.tensor([any(real[start + j * size :][:size]) for j in range(count)])
    allowed = some[:, None] & some[None]
    if causal:
        allowed = allowed.tril(-1)
    logits = torch.stack(sums) @ sort[:, :count] / a["temperature"]
    raw = torch.where(allowed, torch.exp(logits - logits.max()), 0.0)
    for _ in range(a["iterations"]):
        total = raw.sum(1, keepdim=True)
        raw = raw / torch.where(total > 0, total, 1.0)
        total = raw.cumsum(0) if causal else raw.sum(0, keepdim=True)
        raw = raw / torch.where(total > 0, total, 1.0)
    best = torch.where(allowed, raw, -1.0).argmax(1).tolist()
    return raw, [best[i] if allowed[i].any() else -1 for i in range(count)]


# --- patterns --------------------------------------------------------------------------------

NAMES = frozenset("topk lsh cluster sinkhorn".split())

_DEFAULTS: dict[str, dict[str, Any]] = {
    "topk": {},
    "lsh": {
        "buckets": None,
        "rounds": 8,
        "chunk": 64,
        "seed": 0,
        "scale": "root",
        "share_qk": True,
        "look": 1,
        "cut": "order",
        "multiplicity": False,
        "combine": "union",
        "bucket_mask": True,
        "hash": "cross_polytope",
    },
    "cluster": {"count": None, "seed": 0, "assign": "nearest", "of": "qk"},
    "sinkhorn": {"iterations": 7, "temperature": 0.75, "max_blocks": 64, "cut": None},
}


def is_decided(node: Node) -> bool:
    """Whether queries and keys, or what an input says in their place, decide a graph."""
    return any(each.kind == "pattern" and each.parts[0] in NAMES for each in node.walk())


def options(node: Node, at: Place) -> dict[str, Any]:
    """The arguments: numbers, words and the names of inputs; graphs as they are."""
    found = dict(_DEFAULTS[str(node.parts[0])])
    for each in node.nodes:
        called, value = str(each.parts[0]), each.nodes[0]
        is_word = called in ("score", "share", "scale", "cut", "combine", "hash", "assign", "of")
        if called in ("always", "within"):
            found[called] = value
        elif value.kind == "name" and (is_word or called in ("given", "labels")):
            found[called] = str(value.parts[0])
        else:
            found[called] = scalar(value, at)
    return found


def held(node: Node, at: Place, graph: Callable[[Node, Place], np.ndarray]) -> np.ndarray:
    """bool [n, n], False for positions that are not queries of the call."""
    found = np.zeros((at.n, at.n), bool)
    if not any(at.sample.real):
        return found
    match node.parts[0]:
        case "topk":
            pairs = _topk(options(node, at), at, graph)
        case "lsh":
            pairs = set().union(*lsh_rounds(node, at))
        case "cluster":
            return clusters(options(node, at), at)
        case _:
            return _matched(options(node, at), at)
    for q, k in pairs:
        found[q, k] = True
    return found


def _topk(a: dict[str, Any], at: Place, graph: Callable[[Node, Place], np.ndarray]) -> Pairs:
    sample, count = at.sample, len(at.sample.q)
    rule = next(x for x in ("keys", "blocks", "mass", "above") if x in a)
    size = a.get("size", 1)
    score = a.get("score", "dot" if size == 1 else "mean")
    one = TopK(
        size,
        a.get("queries", size),
        score,
        "count" if rule in ("keys", "blocks") else rule,
        a[rule],
    )
    if score in at.inputs:
        # the rows of the queries of a call are the last ones
        given = np.asarray(at.given(score))[:, -sample.n_q :]
        one.given = np.repeat(given, count // len(given), 0)
    for called in ("always", "within"):
        if called in a:
            pairs = graph(a[called], at)
            setattr(one, called, lambda q, k, pairs=pairs: bool(pairs[q, k]))
    share = a.get("share", "group" if sample.group > 1 else "head")
    group = at.head // sample.group * sample.group
    heads = {"head": [at.head], "group": range(group, group + sample.group), "all": range(count)}
    return topk(sample, heads[share], one)


def lsh_rounds(node: Node, at: Place) -> list[Pairs]:
    a, sample = options(node, at), at.sample
    if "given" in a:
        given = np.asarray(at.given(a["given"]))
        q_labels = k_labels = given[at.head if len(given) > 1 else 0]
    else:
        count = a["buckets"] or 2 * max(1, (2 * at.n + a["chunk"]) // (2 * a["chunk"]))
        q_labels = k_labels = hashed(sample.k[at.head], a, count, at)
        if not a["share_qk"]:
            q_labels = np.full(k_labels.shape, NOWHERE)
            q_labels[:, sample.n - sample.n_q :] = hashed(sample.q[at.head], a, count, at)
    how = a["chunk"], a["look"], a["cut"], a["bucket_mask"], a["share_qk"]
    return lsh(q_labels, k_labels, sample, *how)


def query_clusters(a: dict[str, Any], at: Place) -> np.ndarray:
    """The cluster of each query of the call under `of = q`, -1 for padding."""
    sample = at.sample
    real = np.asarray(sample.real)[sample.n - sample.n_q :]
    found = np.full(sample.n_q, -1)
    if real.any():
        points = sample.q[at.head][real]
        found[real] = kmeans(points, points[_first(a, at, len(points))])
    return found


def _first(a: dict[str, Any], at: Place, population: int) -> list[int]:
    """The points that are centroids at first."""
    count = min(at.n, a["count"] or max(1, math.isqrt(at.n)))
    return sorted(Draw(a["seed"], 5, at.layer, at.head).subset(0, population, count))


def clusters(a: dict[str, Any], at: Place) -> np.ndarray:
    sample, first = at.sample, at.n - at.sample.n_q
    if "labels" in a:
        labels = np.asarray(at.given(a["labels"]))
        return np.asarray(labels[:, None] == labels)
    found = np.zeros((at.n, at.n), bool)
    real = np.asarray(sample.real)
    q_at, k_at = first + np.flatnonzero(real[first:]), np.flatnonzero(real)
    q, k = sample.q[at.head][q_at - first], sample.k[at.head][k_at]
    if a["of"] == "q":
        found[q_at] = True
    elif a["assign"] == "balanced":
        width = -(-at.n // a["count"])
        for centroid in unit(_learned("cluster_centroids", at).detach().double().numpy()):
            those = [np.argsort(-(unit(x) @ centroid), kind="stable")[:width] for x in (q, k)]
            found[np.ix_(q_at[those[0]], k_at[those[1]])] = True
    else:
        both = np.concatenate([q, k])
        labels = np.array(kmeans(both, both[_first(a, at, len(both))]))
        found[np.ix_(q_at, k_at)] = labels[: len(q), None] == labels[len(q) :]
    return found


def _learned(called: str, at: Place) -> Tensor:
    """What a layer and head has of it."""
    layers: Tensor = at.sample.learned[called]
    heads = layers[at.layer if len(layers) > 1 else 0]
    return heads[at.head if len(heads) > 1 else 0]


def matching(a: dict[str, Any], at: Place, k: Tensor) -> tuple[Tensor, list[int], Any]:
    """The balanced matrix, the matched blocks, and the block of each position, or below 0."""
    sort = _learned("sinkhorn_sort", at)
    found, rows = sinkhorn(k, at.sample.real, sort, a, at.sample.causal)
    start = list(at.sample.real).index(True)
    return found, rows[: a["cut"]], (np.arange(at.n) - start) // a["size"]


def _matched(a: dict[str, Any], at: Place) -> np.ndarray:
    _, rows, block = matching(a, at, torch.from_numpy(at.sample.k[at.head]))
    there = (block[:, None] >= 0) & (block >= 0)
    if a["cut"] is not None:
        return np.asarray(there & np.isin(block, rows))
    mine = np.array([rows[x] if x >= 0 else -1 for x in block.tolist()])
    return np.asarray(there & ((block[:, None] == block) | (mine[:, None] == block)))


def factors(a: dict[str, Any], at: Place, k: Tensor) -> Tensor:
    """What the keys and values of matched blocks are multiplied with [n, n]: 1, which trains."""
    found, rows, block = matching(a, at, k)
    made = torch.ones(at.n, at.n, dtype=k.dtype)
    for row, other in enumerate(rows):
        if other >= 0:
            of_query = torch.from_numpy((block == row) if a["cut"] is None else block >= 0)
            where = of_query[:, None] & torch.from_numpy(block == other)
            made = made + where * (found[row, other] - found[row, other].detach()).to(k.dtype)
    return made
