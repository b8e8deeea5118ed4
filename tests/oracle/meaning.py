"""What a spec means, from the language's contract alone: dense masks in plain numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from oracle import decided
from oracle.drawn import Draw, cycles, random_blocks, random_keys
from oracle.scalars import (
    Closure,
    Invalid,
    Place,
    combined,
    count,
    pairs_where,
    place_of,
    scalar,
    tokens,
)
from oracle.tree import Attention, Node, Scope, Statement


def _window(q: Any, k: Any, at: Place, a: dict[str, Any]) -> Any:
    if "radius" in a:
        return abs(q - k) <= a["radius"]
    return (-a["after"] <= q - k) & (q - k <= a["before"])


def _powers(q: Any, k: Any, at: Place, a: dict[str, Any]) -> Any:
    distance, power, held = abs(q - k), 1, q == k
    while power < at.n:
        held, power = held | (distance == power), power * a["base"]
    return held


_CLOSED: dict[str, Callable[[Any, Any, Place, dict[str, Any]], Any]] = {
    "full": lambda q, k, at, a: (q >= 0) & (k >= 0),
    "self": lambda q, k, at, a: q == k,
    "causal": lambda q, k, at, a: k <= q,
    "window": _window,
    "dilated": lambda q, k, at, a: (abs(q - k) <= a["radius"]) & ((q - k) % a["step"] == 0),
    "residue": lambda q, k, at, a: (q - k) % a["step"] == 0,
    "strided": lambda q, k, at, a: (abs(q - k) < a["stride"]) | ((q - k) % a["stride"] == 0),
    "block": lambda q, k, at, a: (
        (-a["after"] <= q // a["size"] - k // a["size"])
        & (q // a["size"] - k // a["size"] <= a["before"])
    ),
    "summary": lambda q, k, at, a: (q >= 0) & (k % a["stride"] >= a["stride"] - a["cells"]),
    "fixed": lambda q, k, at, a: (
        (q // a["stride"] == k // a["stride"]) | (k % a["stride"] >= a["stride"] - a["cells"])
    ),
    "powers": _powers,
}

WRITTEN: dict[str, Callable[[Mapping[str, Any]], Node]] = {}
"""Patterns without a line here, by what the language's own text says of their arguments."""

_LEAST = {"step": 1, "stride": 1, "size": 1, "cells": 1, "base": 2, "degree": 2}
_DEFAULTS = {
    "block": {"before": 0, "after": 0},
    "powers": {"base": 2},
    **{each: {"seed": 0, "per_head": True} for each in ("random", "random_blocks", "expander")},
}


def _pattern(node: Node, at: Place) -> np.ndarray:
    called, n = str(node.parts[0]), at.n
    if called in decided.NAMES:
        return decided.held(node, at, graph)
    positional = [each.nodes[0] for each in node.nodes if each.parts[0] == ""]
    match called:
        case "global":
            held = tokens(positional[0], at)
            return np.asarray(held[:, None] | held[None, :])
        case "rows":
            return np.broadcast_to(tokens(positional[0], at)[:, None], (n, n)).copy()
        case "columns":
            return np.broadcast_to(tokens(positional[0], at)[None, :], (n, n)).copy()
        case "same":
            ids = np.asarray(at.given(str(positional[0].parts[0])))
            return np.asarray(ids[:, None] == ids[None, :])
        case "prefix":
            given = positional[0]
            if given.kind == "name" and given.parts[0] in at.inputs:
                length = int(at.inputs[str(given.parts[0])])
            else:
                length = count(given, at)
            return np.broadcast_to(np.arange(n)[None, :] < length, (n, n)).copy()
        case "chosen":
            called = str(positional[0].parts[0])
            size = next(each.size for each in at.spec.inputs if each.name == called)
            lists = np.asarray(at.given(called))
            mine = lists[at.head if len(lists) > 1 else 0]
            return np.asarray((mine[:, None] == (np.arange(n) // size)[None, :, None]).any(-1))
        case "where":
            return pairs_where(positional[0], at)
        case "axial" | "neighborhood":
            return _on_grid(called, [count(each, at, 1) for each in positional], at)
    given_by_name = {
        str(each.parts[0]): scalar(each.nodes[0], at)
        if each.parts[0] == "per_head"
        else count(each.nodes[0], at, _LEAST.get(str(each.parts[0]), 0))
        for each in node.nodes
    }
    arguments = {**_DEFAULTS.get(called, {}), **given_by_name}
    if called in _CLOSED:
        i = np.arange(n)
        return np.asarray(_CLOSED[called](i[:, None], i[None, :], at, arguments))
    if called in WRITTEN:
        return graph(WRITTEN[called](arguments), at)
    return _random(called, arguments, at)


def _random(called: str, a: dict[str, Any], at: Place) -> np.ndarray:
    purpose = {"random": 1, "random_blocks": 2, "expander": 3}[called]
    layer, head = (at.layer, at.head) if a["per_head"] else (0, 0)
    draw = Draw(a["seed"], purpose, layer, head)
    held = np.zeros((at.n, at.n), bool)
    if called == "random":
        for q, keys in enumerate(random_keys(draw, at.n, a["keys"], at.spec.causal)):
            held[q, list(keys)] = True
    elif called == "random_blocks":
        size = a["size"]
        drawn = random_blocks(draw, -(-at.n // size), a["blocks"], at.spec.causal)
        for row, columns in enumerate(drawn):
            for column in columns:
                held[row * size : (row + 1) * size, column * size : (column + 1) * size] = True
    else:
        if a["degree"] % 2:
            raise Invalid("an odd degree")
        for cycle in cycles(draw, at.n, a["degree"] // 2):
            for here, after in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
                held[here, after] = held[after, here] = True
    return held


def _on_grid(called: str, extents: list[int], at: Place) -> np.ndarray:
    """Patterns of cells; extra tokens take no part."""
    grid, extra = at.grid, at.spec.extra_tokens
    if not grid:
        raise Invalid("no grid")
    cells = np.array(list(np.ndindex(*grid)), int).reshape(-1, len(grid))
    held = np.zeros((at.n, at.n), bool)
    if called == "axial":
        inner = (cells[:, None] != cells[None]).sum(-1) <= 1
    else:
        if len(extents) != len(grid) or any(each % 2 == 0 for each in extents):
            raise Invalid("extents of another grid, or even")
        inner = np.ones((len(cells), len(cells)), bool)
        for axis, (extent, size) in enumerate(zip(extents, grid, strict=True)):
            # a box longer than the axis is the axis
            start = np.clip(cells[:, axis] - extent // 2, 0, max(0, size - extent))[:, None]
            inner &= (cells[None, :, axis] >= start) & (cells[None, :, axis] < start + extent)
    held[extra:, extra:] = inner
    return held


def graph(node: Node, at: Place) -> np.ndarray:
    """bool [n, n], before `causal`."""
    match node.kind:
        case "pattern":
            return _pattern(node, at)
        case "g~":
            return np.asarray(~graph(node.nodes[0], at))
        case "transpose":
            return graph(node.nodes[0], at).T
        case "shift":
            return _shifted(graph(node.nodes[0], at), count(node.nodes[1], at, -math.inf))
        case "graph":
            return _named(node, at)
        case _:
            a, b = (graph(each, at) for each in node.nodes)
            return combined(node.kind, a, b)


def _shifted(held: np.ndarray, by: int) -> np.ndarray:
    n = len(held)
    moved = np.zeros_like(held)
    if abs(by) < n:
        here, there = slice(max(by, 0), n + min(by, 0)), slice(max(-by, 0), n + min(-by, 0))
        moved[here, here] = held[there, there]
    return moved


def _named(node: Node, at: Place) -> np.ndarray:
    called = str(node.parts[0])
    if called in at.names:
        bound = at.names[called]
        return graph(bound.node, replace(at, names=bound.place.names))
    found = next(each for each in at.spec.graphs if each.name == called)
    names = {}
    for parameter, given in zip(found.parameters, node.nodes, strict=True):
        names[parameter] = Closure(given.nodes[0], at)
    return graph(found.body, replace(at, names=names))


@dataclass(frozen=True)
class Slot:
    """What one head of one layer does."""

    attend: Node
    scale: Node | None
    normalize: str
    scores: tuple[Node, ...]


def slot(spec: Attention, layer: int, head: int) -> Slot:
    """The innermost statements that cover a layer and a head; `Invalid` where two do, or none."""
    groups: dict[str, list[tuple[int, tuple[Node, ...]]]] = {}
    _collect(spec.body, 0, layer, head, groups)
    chosen: dict[str, tuple[Node, ...]] = {}
    for what, found in groups.items():
        depths = [depth for depth, _ in found]
        if len(set(depths)) < len(depths):
            raise Invalid(f"two `{what}` of one depth")
        chosen[what] = max(found, key=lambda pair: pair[0])[1]
    if "attend" not in chosen:
        raise Invalid("nothing is attended")
    scale, normal = chosen.get("scale"), chosen.get("normalize")
    return Slot(
        chosen["attend"][0].nodes[0],
        scale[0].nodes[0] if scale else None,
        str(normal[0].parts[0]) if normal else "softmax",
        chosen.get("score", ()),
    )


def _collect(
    body: tuple[Statement, ...],
    depth: int,
    layer: int,
    head: int,
    groups: dict[str, list[tuple[int, tuple[Node, ...]]]],
) -> None:
    here = [each for each in body if isinstance(each, Node)]
    for what in ("attend", "scale", "normalize"):
        groups.setdefault(what, []).extend((depth, (each,)) for each in here if each.kind == what)
        if not groups[what]:
            del groups[what]
    changes = tuple(each for each in here if each.kind == "score")
    if changes:
        groups.setdefault("score", []).append((depth, changes))
    for each in body:
        if isinstance(each, Scope):
            number = layer if each.which == "layer" else head
            if number in each.members:
                _collect(each.body, depth + 1, layer, head, groups)


def mask(
    spec: Attention,
    n: int,
    layer: int = 0,
    head: int = 0,
    inputs: Mapping[str, Any] | None = None,
    sample: decided.Sample | None = None,
) -> np.ndarray:
    """The pairs of one head, bool [n, n], cut by `causal`; of a hybrid those of its graph."""
    node = slot(spec, layer, head).attend
    if node.kind == "mechanism":
        raise Invalid("a mechanism alone has no pairs")
    at = place_of(spec, n, layer, head, inputs, sample)
    at.require_length()
    if n == 0:
        # no positions have no pairs, whatever the sizes are worth
        return np.zeros((0, 0), bool)
    held = graph(node.nodes[0] if node.kind == "g+" else node, at)
    return np.asarray(held & np.tri(n, dtype=bool) if spec.causal else held)


def masks(
    spec: Attention,
    n: int,
    inputs: Mapping[str, Any] | None = None,
    sample: decided.Sample | None = None,
) -> np.ndarray:
    """bool [layers, heads, n, n]."""
    heads = range(spec.heads or 1)
    return np.stack(
        [
            np.stack([mask(spec, n, layer, head, inputs, sample) for head in heads])
            for layer in range(spec.layers or 1)
        ]
    )
