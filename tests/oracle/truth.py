"""Whether a claim holds at one length, by brute force."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np

from oracle.meaning import graph, masks
from oracle.scalars import Invalid, Place, count, place_of, scalar
from oracle.tree import Attention, Claim, Node

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def holds(
    spec: Attention, claim: Claim, n: int, inputs: Mapping[str, Any] | None = None, held: Any = None
) -> bool:
    """Whether a claim holds at n, for one sample of the inputs, of known masks; raises Invalid."""
    expr = claim.expr
    held = masks(spec, n, inputs) if held is None else held
    match expr.kind:
        case "flag":
            return flag(str(expr.parts[0]), held, spec, inputs)
        case "reach":
            layers = count(expr.nodes[0], place_of(spec, n))
            return bool((stack(held, layers) | ~allowed(spec, n)).all())
        case "figure":
            return all(_compared(claim, place, held) for place in _places(spec, n, inputs))
        case _:
            return all(_about(claim, place) for place in _places(spec, n, inputs))


def _places(spec: Attention, n: int, inputs: Mapping[str, Any] | None) -> list[Place]:
    found = [
        place_of(spec, n, layer, head, inputs)
        for layer in range(spec.layers or 1)
        for head in range(spec.heads or 1)
    ]
    found[0].require_length()
    return found


def _compared(claim: Claim, at: Place, held: np.ndarray) -> bool:
    """A comparison in one layer and head: what its bound does not mention is taken together."""
    name, compare = str(claim.expr.parts[0]), str(claim.expr.parts[1])
    bound = claim.expr.nodes[0]
    asked = _names(bound, at.spec)
    if name in ("edges", "degree", "density"):
        # figures of a layer and a head; all others are about the whole stack
        held = held[at.layer : at.layer + 1] if "layer" in asked else held
        held = held[:, at.head : at.head + 1] if "head" in asked else held
    found = figure(name, at.spec, held)
    return found is not None and COMPARE[compare](found, scalar(bound, at))


def _names(node: Node, spec: Attention) -> set[str]:
    """The names in an expression, and in what local names stand for."""
    found = {str(each.parts[0]) for each in node.walk() if each.kind == "name"}
    meant = dict(spec.lets)
    return found.union(*(_names(meant[name], spec) for name in found & meant.keys()))


def _about(claim: Claim, at: Place) -> bool:
    first, second = (graph(each, at) for each in claim.expr.nodes)
    if at.spec.causal:
        first, second = np.tril(first), np.tril(second)
    inside = not (first & ~second).any()
    return inside if claim.expr.kind == "subset" else bool((first == second).all())


def flag(
    name: str, held: np.ndarray, spec: Attention, inputs: Mapping[str, Any] | None = None
) -> bool:
    """A claim that is a word, of masks [layers, heads, n, n]."""
    match name:
        case "causal":
            return not np.triu(held, 1).any()
        case "rows_nonempty":
            return bool(held.any(-1).all())
        case "symmetric":
            return bool((held == held.swapaxes(-1, -2)).all())
        case _:
            return _stable(held, spec, inputs or {})


def _stable(held: np.ndarray, spec: Attention, inputs: Mapping[str, Any]) -> bool:
    """Whether row q is the same pairs at every length above q, up to that of the masks.

    Of an input a shorter sequence has the first positions; a length is one number. Lengths that a
    size or the grid does not have are passed by.
    """
    n = held.shape[-1]
    before = np.zeros((*held.shape[:2], 0, 0), bool)
    for m in range(1, n + 1):
        sample = {key: x[:m] if np.ndim(x) else x for key, x in inputs.items()}
        try:
            after = held if m == n else masks(spec, m, sample)
        except Invalid:
            continue
        rows = before.shape[-1]
        if (after[..., :rows, :rows] != before).any() or after[..., :rows, rows:].any():
            return False
        before = after
    return True


def allowed(spec: Attention, n: int) -> np.ndarray:
    return np.tri(n, dtype=bool) if spec.causal else np.ones((n, n), bool)


def stacks(held: np.ndarray) -> Iterator[np.ndarray]:
    """(A_{L-1} or I) … (A_0 or I) for L = 0, 1, 2, … until no layer adds anything."""
    one = np.eye(held.shape[-1], dtype=bool)
    found, layer = one, 0
    while True:
        yield found
        union = held[min(layer, len(held) - 1)].any(0) | one
        after = (union.astype(np.float32) @ found.astype(np.float32)) > 0
        layer += 1
        if layer >= len(held) and (after == found).all():
            return
        found = after


def stack(held: np.ndarray, layers: int) -> np.ndarray:
    """What so many layers have read."""
    *_, found = islice(stacks(held), layers + 1)
    return found


def distances(held: np.ndarray) -> np.ndarray:
    """Shortest paths in the union of all layers and heads, -1 for never."""
    n = held.shape[-1]
    union = (held.any((0, 1)) | np.eye(n, dtype=bool)).astype(np.float32)
    found = np.where(np.eye(n, dtype=bool), 0, -1)
    reached, steps = np.eye(n, dtype=bool), 0
    while True:
        steps += 1
        after = (union @ reached.astype(np.float32)) > 0
        if (after == reached).all():
            return found
        found[after & ~reached] = steps
        reached = after


def depth(spec: Attention, held: np.ndarray) -> int | None:
    may = allowed(spec, held.shape[-1])
    for layers, found in enumerate(stacks(held)):
        if (found | ~may).all():
            return layers
    return None


def figure(name: str, spec: Attention, held: np.ndarray) -> float | None:
    """A figure of masks [layers, heads, n, n]; None where some allowed pair is never joined."""
    n = held.shape[-1]
    match name:
        case "edges":
            return int(held.sum())
        case "density":
            return float(held.mean())
        case "degree":
            return int(held.sum(-1).max())
        case "min_degree":
            return int(held.sum(-1).min())
        case "depth":
            return depth(spec, held)
    may, paths = allowed(spec, n), distances(held)
    if (paths[may] < 0).any():
        return None
    if name == "diameter":
        return int(paths[may].max(initial=0))
    # pairs of different positions
    return float(paths[may].sum() / max(1, may.sum() - n))
