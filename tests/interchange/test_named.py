"""What a graph is called: the name of the pattern that it is, in as few letters as it was said."""

from __future__ import annotations

import numpy as np
import pytest

import attnspec
from attnspec.interchange.named import _ONE, _PLAIN, _TWO, named
from attnspec.spec import Spec

N = 13

SAID = {
    "where(q // 3 == k // 3)": "block(size = 3)",
    "where(abs(q - k) <= 6 and (q - k) % 3 == 0)": "dilated(radius = 6, step = 3)",
    "where(k < 3) | rows(first(3))": "global(first(3))",
    "where(k % 3 == 0)": "columns(every(3))",
    "where(k <= q and q - k <= 3)": "window(before = 3, after = 0)",
    "where(q // 6 == k // 6 or k % 6 >= 3)": "fixed(stride = 6, cells = 3)",
    "rows(positions(1, 4)) | columns(positions(1, 4))": "global(positions(1, 4))",
    "self | columns(positions(1, 4)) | rows(positions(1, 4))": "global(positions(1, 4)) | self",
    "rows(positions(1, 4)) | columns(positions(1, 5))": (
        "columns(positions(1, 5)) | rows(positions(1, 4))"
    ),
    "where(k <= q) & where(k < 3)": "causal columns(first(3))",
    "~where(k < 3) & causal": "causal ~columns(first(3))",
    "where(abs(q - k) <= 2) & (where(k < 3) | where(q % 5 == 1))": (
        "(columns(first(3)) | where(q % 5 == 1)) & window(radius = 2)"
    ),
    "~(where(k < 3) & where(q % 5 == 1))": "~(columns(first(3)) & where(q % 5 == 1))",
    "where(k <= q and (abs(q - k) <= 2 or k < 3))": "causal window(radius = 2) | columns(first(3))",
    "where(q % 5 == 1 or k % 7 == 3)": "where(q % 5 == 1 or k % 7 == 3)",
    "where(q - k < 3 and k - q < 3)": "window(radius = 2)",
    "where(k <= q and q - k < 8 and (q - k) % 2 == 0)": "causal dilated(radius = 7, step = 2)",
}
"""What is said, and what it is called; behind `causal` beside that statement."""


def spec_of(text: str, statement: str = "") -> Spec:
    return attnspec.parse(f"attention a {{ {statement} attend {text} }}")


def called(text: str) -> str:
    """What a graph is called, which has the same pairs."""
    spec = spec_of(text)
    graph = spec.program.attends[0].graph
    assert graph is not None
    found = named(graph)
    statement = "causal" if found.causal else ""
    assert np.array_equal(spec_of(found.text, statement).mask(N), spec.mask(N)), found
    return f"{statement} {found.text}".strip()


@pytest.mark.parametrize("text", SAID)
def test_a_graph_is_called_by_its_patterns(text: str) -> None:
    assert called(text) == SAID[text]


def test_a_pattern_keeps_its_name() -> None:
    texts = [*_PLAIN, *(text.format(3) for text in _ONE), *(text.format(6, 3) for text in _TWO)]
    for text in texts:
        assert called(text) == text


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("after", range(4))
def test_a_band_is_called_a_window_whatever_its_sides(before: int, after: int) -> None:
    names = {
        (0, 0): "self",
        **{(one, one): f"window(radius = {one})" for one in (1, 2, 3)},
    }
    by_sides = f"window(before = {before}, after = {after})"
    for said in (
        f"where(k - q <= {after} and q - k <= {before})",
        f"where(q < k + {before + 1} and k < q + {after + 1})",
    ):
        assert called(said) == names.get((before, after), by_sides)
