"""Every figure of a report at n <= 64 against its definition on masks, for the zoo and for random
compositions. What a definition on one small mask cannot show is named, with where it is shown."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from random_specs import spec_text
from reach_brute import FAR, Small, small_zoo
from zoo import OF_EACH_KIND

from attnspec.analysis.report.inquiry import GRAPH_HEADS
from attnspec.analysis.report.report import NAMES, Report
from attnspec.spec import parse

SIZE, ELEMENT = 64, 4

ELSEWHERE = {
    **dict.fromkeys(
        GRAPH_HEADS, "tests/analysis/test_graph_heads.py: masks of the heads without a mechanism"
    ),
    **dict.fromkeys(
        ("choice", "scoring_flops"),
        "tests/decided/test_figures_of_choices.py: samples, simulations, and counts by hand",
    ),
    "order": "tests/analysis/test_order.py: counts over n, growth derived by hand",
    "stable": "tests/graphs/test_stable.py: masks at all lengths up to 24",
    "break_even": "tests/analysis/test_cost.py: it is about other lengths",
    "eviction": "tests/analysis/test_cost.py: the last readers, and its words",
    "bytes": "tests/analysis/test_cost.py: a model of the kernels, held against nothing but itself",
    "peak_memory": "tests/analysis/test_cost.py: what torch allocates",
    "backward_flops": "tests/analysis/test_cost.py: what torch counts",
}


class Brute:
    """Figures of a small stack by their definitions."""

    def __init__(self, small: Small) -> None:
        self.small, self.n, self.spec = small, small.n, small.spec
        heads = range(self.spec.heads or 1)
        self.masks = np.array(
            [[small.mask(layer, head) for head in heads] for layer in range(self.spec.layers)]
        )
        self.heads = self.masks.reshape(-1, self.n, self.n)
        self.union = np.logical_or.reduce(self.heads)
        self.both = self.union | self.union.T
        self.neighbours = self.both.sum(axis=1)
        scale = np.sqrt(np.maximum(self.neighbours, 1))
        self.values = np.linalg.eigvalsh(self.both / scale[:, None] / scale)
        self.slowest = float(np.sort(np.abs(self.values))[-2]) if self.n > 1 else 0.0

    def longest(self, found: np.ndarray) -> int | None:
        most = int(found[self.small.allowed].max())
        return None if most == FAR else most

    def mean_distance(self) -> float | None:
        if self.longest(self.small.distances) is None:
            return None
        apart = self.small.allowed & ~np.eye(self.n, dtype=bool)
        return float(self.small.distances[apart].mean()) if apart.any() else 0.0

    def live(self) -> np.ndarray:
        """How many keys each head holds before each step of generation, [heads, n]."""
        return np.array(
            [[mask[t:, : t + 1].any(axis=0).sum() for t in range(self.n)] for mask in self.heads]
        )

    @property
    def reads_later(self) -> bool:
        return bool(np.triu(self.heads, 1).any())


def useful(b: Brute) -> int:
    return int(4 * SIZE * b.masks.sum(axis=(1, 2, 3)).max())


EXACT: dict[str, Callable[[Brute], object]] = {
    "edges": lambda b: b.heads.sum(),
    "density": lambda b: b.heads.mean(),
    "degree": lambda b: b.heads.sum(axis=2).max(),
    "min_degree": lambda b: b.heads.sum(axis=2).min(),
    "mean_degree": lambda b: b.heads.sum(axis=2).mean(),
    "readers": lambda b: b.heads.sum(axis=1).max(),
    "min_readers": lambda b: b.heads.sum(axis=1).min(),
    "empty_rows": lambda b: (b.heads.sum(axis=2) == 0).sum(),
    "unread_keys": lambda b: (b.heads.sum(axis=1) == 0).sum(),
    "rows_nonempty": lambda b: b.heads.any(axis=2).all(),
    "causal": lambda b: not b.reads_later,
    "symmetric": lambda b: (b.heads == b.heads.transpose(0, 2, 1)).all(),
    "depth": lambda b: b.longest(b.small.hops),
    "diameter": lambda b: b.longest(b.small.distances),
    "path_length": Brute.mean_distance,
    "spectral_gap": lambda b: 1 - b.slowest,
    "useful_flops": useful,
}
"""Figures with a definition on the masks."""


def assert_bounds(b: Brute, report: Report) -> None:
    """What is said of costs, where a definition only leaves a side open."""
    assert useful(b) <= report.flops  # type: ignore[operator]
    assert report.intensity == pytest.approx(report.flops / report.bytes)  # type: ignore[operator]


def assert_caches(b: Brute, report: Report) -> None:
    if b.reads_later:
        assert report.kv_cache is None
        assert report.kv_cache_bytes is None
        return
    live = b.live()
    assert report.kv_cache == live.max()
    assert report.kv_cache_bytes == live.sum(axis=0).max() * 2 * SIZE * ELEMENT


BOUNDED = frozenset("flops intensity".split())
CACHES = frozenset(("kv_cache", "kv_cache_bytes"))


def assert_every_figure(small: Small) -> None:
    b = Brute(small)
    report = small.spec.analyse(small.n, small.stack.inputs)
    for name, definition in EXACT.items():
        expected = definition(b)
        found = getattr(report, name)
        if isinstance(expected, float | np.floating):
            assert found == pytest.approx(expected, abs=1e-7), name
        else:
            assert found == expected, name
        assert report.quality[name] == "exact", name
    assert_bounds(b, report)
    assert_caches(b, report)


def test_no_figure_is_left_out() -> None:
    shown = {*EXACT, *BOUNDED, *CACHES, *ELSEWHERE}
    assert shown == set(NAMES)


ZOO = small_zoo()
KINDS = {name for _, name in OF_EACH_KIND}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in KINDS else pytest.mark.slow) for name in ZOO],
)
def test_the_zoo(name: str) -> None:
    assert_every_figure(ZOO[name])


@pytest.mark.parametrize(
    # each at one length
    ("seed", "n"),
    [
        pytest.param(seed, n, marks=pytest.mark.slow if seed == 10 or (seed + at) % 3 else ())
        for seed in range(20)
        for at, n in enumerate([2, 23, 64])
    ],
)
def test_random_compositions(seed: int, n: int) -> None:
    assert_every_figure(Small(parse(spec_text(seed)), n))
