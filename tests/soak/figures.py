"""What a report says of a spec at one length, against counts and walks of its masks."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracle import truth
from oracle.tree import Attention

from attnspec.analysis.report.report import Report
from attnspec.spec import Spec
from soak.trial import Trial, has_mechanism, shown


def report(trial: Trial, spec: Spec, n: int, sample: dict[str, Any], wanted: np.ndarray) -> None:
    """The figures of `analyse`, where they say that they are exact."""
    try:
        found = spec.analyse(n, sample or None)
        asked = ["edges", "degree", "min_degree", "density", "causal", "rows_nonempty", "symmetric"]
        asked += ["empty_rows", "unread_keys"]
        asked += ["depth", "diameter", "path_length"] if trial.numbers.random() < 0.3 else []
        got = {name: (getattr(found, name), found.quality[name]) for name in asked}
    except Exception as error:
        trial.crashed("analyse", error, n)
        return
    if n == 0 or has_mechanism(trial.spec):
        # what a report says of no positions, and of mechanisms, is no matter of pairs
        return
    for name, (value, quality) in got.items():
        if quality != "exact":
            trial.refusals[f"analyse: {name} {quality}"] += 1
            continue
        want = _figure(trial.spec, name, wanted)
        right = value == want
        if isinstance(want, float) and isinstance(value, float):
            right = abs(value - want) <= 1e-9 * max(1.0, abs(want))
        trial.same(f"analyse {name}", right, f"{value} instead of {want} {shown(sample)}", n)
    try:
        if trial.numbers.random() < 0.3:
            paths(trial, found, n, wanted)
    except ValueError as error:
        trial.crashed("analyse", error, n)


def _figure(spec: Attention, name: str, wanted: np.ndarray) -> Any:
    if name in ("causal", "rows_nonempty", "symmetric"):
        return truth.flag(name, wanted, spec)
    if name == "empty_rows":
        return int((~wanted.any(-1)).sum())
    if name == "unread_keys":
        return int((~wanted.any(-2)).sum())
    return truth.figure(name, spec, wanted)


def _hops(spec: Attention, wanted: np.ndarray, query: int) -> np.ndarray:
    n = wanted.shape[-1]
    found = np.full(n, -1)
    for layers, reached in enumerate(truth.stacks(wanted)):
        found[reached[query] & (found < 0)] = layers
    found[~truth.allowed(spec, n)[query]] = -1
    return found


def paths(trial: Trial, found: Report, n: int, wanted: np.ndarray) -> None:
    """`hops`, `path` and `eccentricity` of one query."""
    query = int(trial.numbers.integers(n))
    far = _hops(trial.spec, wanted, query)
    hops = found.hops(query)
    trial.same("hops", bool((hops == far).all()), f"{query}: {hops} instead of {far}", n)
    key = int(trial.numbers.integers(n))
    steps = found.path(query, key)
    if steps is None or far[key] < 0:
        # a pair that is not allowed may be joined all the same
        trial.same("path", steps is None or not truth.allowed(trial.spec, n)[query, key], "none", n)
    else:
        right = len(steps) <= far[key] and _joined(wanted, query, key, steps)
        trial.same("path", right, f"{query} reads {key} by {steps}, {far[key]} layers", n)
    walks = truth.distances(wanted)[query][truth.allowed(trial.spec, n)[query]]
    want = None if (walks < 0).any() else int(walks.max())
    got = found.eccentricity(query)
    trial.same("eccentricity", got == want, f"of {query}: {got} instead of {want}", n)


def _joined(wanted: np.ndarray, query: int, key: int, steps: Any) -> bool:
    """Whether each step is a pair of its layer and head; where a layer stays there is none."""
    here, last = query, None
    for layer, head, position in steps:
        if last is not None and layer > last:
            return False
        if position != here and not wanted[min(layer, len(wanted) - 1), head, here, position]:
            return False
        here, last = position, layer
    return here == key
