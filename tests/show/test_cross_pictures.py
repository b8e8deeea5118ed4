"""Pictures of m queries and n keys: cells, both sizes of a frame, files."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from attnspec.elaborate import Elaborated
from attnspec.graphs.stack import Stack
from attnspec.ir.crossing import crossed
from attnspec.show.drawing import Cells, one_plot
from attnspec.show.figure import figure
from attnspec.show.html import html
from attnspec.show.tally import tally
from attnspec.show.terminal import draw
from attnspec.spec import Spec, parse

BAND = "attention a { cross attend where(abs(q * n - k * m) <= 3 * m) | columns(first(2)) }"


def at(spec: Spec, m: int, n: int) -> tuple[Elaborated, int]:
    program, length = crossed(spec.program, n, m)
    return replace(spec.elaborated, program=program), length


@pytest.mark.parametrize(("m", "n"), [(15, 40), (40, 15), (1, 9), (0, 5), (5, 0)])
@pytest.mark.parametrize("side", [1, 4])
def test_cells_hold_the_share_of_their_pairs(m: int, n: int, side: int) -> None:
    spec = parse(BAND)
    elaborated, length = at(spec, m, n)
    program = elaborated.program
    relation = Stack(program).relation(length)
    found = tally(relation, length, side, False, program.crossing)
    mask = spec.mask(n, m=m)
    rows, columns = -(-m // side), -(-n // side)
    assert found.density.shape == found.allowed.shape == (rows, columns)
    for i in range(rows):
        for j in range(columns):
            cell = mask[i * side : (i + 1) * side, j * side : (j + 1) * side]
            assert found.density[i, j] == pytest.approx(cell.mean())
            assert found.allowed[i, j] == cell.size
    assert (found.queries, found.n, found.edges) == (m, n, mask.sum())
    if mask.size:
        assert (found.least, found.most) == (mask.sum(1).min(), mask.sum(1).max())


def test_a_long_picture_is_estimated_from_its_queries() -> None:
    spec = parse("attention a { cross attend where((q * k) % 7 < 3 and q * n >= k * m) }")
    elaborated, length = at(spec, 1000, 6000)
    relation = Stack(elaborated.program).relation(length)
    found = tally(relation, length, 128, False, elaborated.program.crossing)
    assert found.sampled
    assert found.density.shape == (8, 47)
    assert found.edges == pytest.approx(spec.mask(6000, m=1000).sum(), rel=0.05)


@pytest.mark.parametrize(("m", "n"), [(3, 7), (7, 3)])
def test_the_terminal_shows_m_lines_of_n_keys(m: int, n: int) -> None:
    spec = parse(BAND)
    elaborated, length = at(spec, m, n)
    drawn = figure(elaborated, length, layer=0, head=None, inputs={}, width=80)
    assert drawn.about == f"m = {m} · n = {n}"
    lines = draw(drawn.plots, 80, "ascii").plain.splitlines()
    edges = [at for at, line in enumerate(lines) if "-" in line]
    rows = [
        re.split(r"[|+]", line, maxsplit=1)[1][: 2 * n] for line in lines[edges[0] + 1 : edges[1]]
    ]
    found = [[sign == "#" for sign in row[::2]] for row in rows]
    assert np.array_equal(found, spec.mask(n, m=m))


@pytest.mark.parametrize(("m", "n"), [(30, 80), (80, 30), (400, 150)])
def test_files_have_frames_of_both_sizes(m: int, n: int) -> None:
    elaborated, length = at(parse(BAND), m, n)
    found = figure(elaborated, length, layer=None, head=None, inputs={})
    (cells,) = (item for item in one_plot(found.plots[0]).items if isinstance(item, Cells))
    side = found.plots[0].tally.side
    assert cells.paints.shape == (-(-m // side), -(-n // side))
    page = html(found)
    assert f'"n": {n}' in page or f'"n":{n}' in page
    assert f'"queries": {m}' in page or f'"queries":{m}' in page


def test_choices_of_another_sequence_are_drawn_as_they_are_given() -> None:
    spec = parse(
        "attention a { cross input sel: choices(size = 4) attend chosen(sel) | window(radius = 1) }"
    )
    inputs = {"sel": np.array([[[0], [1], [2], [-1], [0], [1]]])}
    shown, mask = str(spec.show(12, m=6, inputs=inputs)), spec.mask(12, m=6, inputs=inputs)
    rows = [re.split("[│┤]", line)[1] for line in shown.splitlines() if "│" in line]
    held = [[cell == "██" for cell in (row[2 * k : 2 * k + 2] for k in range(12))] for row in rows]
    assert (np.array(held) == mask).all()


@pytest.mark.parametrize("given", [True, False])
def test_choices_that_are_given_are_no_sample(given: bool) -> None:
    spec = parse("attention a { input sel: choices(size = 4) causal attend chosen(sel) }")
    inputs = {"sel": np.arange(12)[None, :, None] // 8} if given else {}
    assert ("a sample" in str(spec.show(12, inputs=inputs))) is not given
