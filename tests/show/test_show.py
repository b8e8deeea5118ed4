"""Pictures: counts against the mask, and golden texts of what a terminal shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from goldens import Golden

import attnspec
from attnspec.cli import main
from attnspec.show.figure import MOST_PANELS, Plot, figure
from attnspec.show.tally import SHORT, Tally, room_for, side_for, tally
from attnspec.show.terminal import Signs, draw
from attnspec.spec import Spec

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def counted(spec: Spec, n: int, side: int, head: int = 0) -> Tally:
    return tally(spec.relation(n, 0, head), n, side, spec.program.causal)


def expected(mask: np.ndarray, side: int, causal: bool) -> np.ndarray:
    """The share of each cell's pairs, from the dense mask."""
    n = len(mask)
    cells = -(-n // side)
    allowed = np.tril(np.ones((n, n))) if causal else np.ones((n, n))
    share = np.zeros((cells, cells))
    for row in range(cells):
        for column in range(cells):
            cell = np.s_[row * side : (row + 1) * side, column * side : (column + 1) * side]
            if allowed[cell].any():
                share[row, column] = (mask & (allowed > 0))[cell].sum() / allowed[cell].sum()
    return share


SPECS = {
    "window": "attention a { attend window(radius = 3) }",
    "causal window": "attention a { causal attend window(radius = 5) }",
    "residue": "attention a { causal attend residue(step = 7) }",
    "dilated": "attention a { attend dilated(radius = 9, step = 4) }",
    "union": "attention a { attend window(radius = 2) | global(first(2)) | powers(base = 2) }",
    "difference": "attention a { attend full - window(radius = 2) }",
    "where": "attention a { attend where((q * q + k) % 5 == 0) }",
    "random": "attention a { attend random(keys = 3, seed = 1) }",
    "nothing": "attention a { attend self - full }",
}


@pytest.mark.parametrize("text", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize(("n", "side"), [(1, 1), (13, 1), (13, 5), (64, 8), (65, 16), (131, 7)])
def test_cells_hold_the_share_of_their_pairs(text: str, n: int, side: int) -> None:
    spec = attnspec.parse(text)
    mask = spec.mask(n)
    found = counted(spec, n, side)
    np.testing.assert_allclose(found.density, expected(mask, side, spec.program.causal), atol=1e-12)
    degrees = mask.sum(axis=1)
    assert (found.edges, found.least, found.most) == (mask.sum(), degrees.min(), degrees.max())
    assert found.sampled == 0


def test_a_wrong_count_would_be_seen() -> None:
    spec = attnspec.parse("attention a { attend window(radius = 3) }")
    other = attnspec.parse("attention a { attend window(radius = 4) }").mask(65)
    assert not np.allclose(counted(spec, 65, 16).density, expected(other, 16, False))


def test_cells_after_the_diagonal_are_later() -> None:
    spec = attnspec.parse("attention a { causal attend full }")
    found = counted(spec, 65, 16)
    assert (found.later == np.triu(np.ones((5, 5), bool), 1)).all()
    # of a cell on the diagonal only the pairs that causal allows are asked for
    assert (found.density == np.tril(np.ones((5, 5)))).all()


def test_no_positions() -> None:
    spec = attnspec.parse("attention a { attend full }")
    found = counted(spec, 0, 1)
    assert (found.cells, found.edges, found.least, found.most) == (0, 0, 0, 0)


def test_a_long_predicate_is_estimated_from_rows() -> None:
    n = 4 * SHORT + 1
    # every query but the multiples of 59 has one inverse modulo 59, which no closed form tells
    spec = attnspec.parse("attention a { attend where(q * k % 59 == 1) }")
    found = counted(spec, n, 256)
    assert 0 < found.sampled < n // 16
    assert found.edges == pytest.approx(n * n * 58 / 59**2, rel=0.01)
    assert found.density.mean() == pytest.approx(58 / 59**2, rel=0.05)


def test_a_long_window_is_exact_and_needs_no_square() -> None:
    n = 1_000_000
    spec = attnspec.parse("attention a { attend window(before = 200, after = 0) }")
    found = counted(spec, n, side_for(n, 70))
    assert found.sampled == 0
    assert found.edges == sum(min(200, q) + 1 for q in range(n))


@pytest.mark.parametrize("n", [1, 2, 63, 70, 71, 100, 1000, 65536, 2**31 - 1])
def test_sides_fit_and_are_round(n: int) -> None:
    side = side_for(n, 70)
    assert -(-n // side) <= 70
    assert side == 1 or -(-n // (side // 2 or 1)) > 70
    odd = side
    while odd % 2 == 0:
        odd //= 2
    assert odd in (1, 3, 5)


def plain(found: Tally) -> Plot:
    """A plot of one term without a word above it."""
    leading = np.where(found.density > 0, 0, -1)
    return Plot("", (), found, (0,), found.density[..., None] > 0, leading, None, None)


def picture(spec: Spec, n: int, signs: Signs, width: int = 80, **options: int) -> str:
    drawn = figure(
        spec.elaborated,
        n,
        layer=options.get("layer", 0),
        head=options.get("head"),
        inputs={},
        width=width,
    )
    text = draw(drawn.plots, width, signs).plain
    return "\n".join([drawn.name, drawn.about, "", text, *drawn.footer]) + "\n"


def example(name: str, **parameters: int) -> Spec:
    return attnspec.load(EXAMPLES / f"{name}.attn", parameters=parameters)


def test_small_pairs(golden: Golden) -> None:
    golden(picture(example("streaming_llm", sinks=2, recent=4), 14, "blocks"))


def test_two_heads(golden: Golden) -> None:
    golden(picture(example("sparse_strided"), 64, "blocks"))


def test_heads_beside_each_other(golden: Golden) -> None:
    golden(picture(example("sparse_strided"), 16, "ascii"))


def test_cells_in_shades(golden: Golden) -> None:
    golden(picture(example("bigbird"), 4096, "blocks"))


def test_cells_in_ascii(golden: Golden) -> None:
    golden(picture(example("longformer", radius=96), 1000, "ascii"))


def test_a_grid(golden: Golden) -> None:
    golden(picture(example("swin", height=6, width=6, size=3), 36, "blocks", layer=1))


@pytest.mark.parametrize("width", [20, 40, 80, 200])
@pytest.mark.parametrize("n", [0, 1, 2, 37, 64, 1000, 100_000])
@pytest.mark.parametrize("signs", ["blocks", "ascii", "colour"])
def test_pictures_keep_to_the_width(width: int, n: int, signs: Signs) -> None:
    spec = example("causal_window")
    panel = plain(counted(spec, n, side_for(n, room_for(n, width))))
    lines = draw([panel], max(width, 0), signs).plain.split("\n")
    framed = [line for line in lines if line.endswith(("│", "|", "+", "┐", "┘"))]
    assert bool(framed) == (n > 0)
    assert max((len(line) for line in framed), default=0) <= width


def test_ascii_is_ascii_and_colours_are_half_blocks() -> None:
    spec = example("causal_window", keys=20)
    body = draw([plain(counted(spec, 64, 1))], 80, "ascii").plain
    body = body.replace("↓", "v").replace("→", "->")
    assert body.isascii()
    coloured = draw([plain(counted(spec, 64, 1))], 80, "colour")
    assert "▀" in coloured.plain
    # kept, itself, not kept, later
    assert len({span.style for span in coloured.spans}) > 4


def test_only_distinct_heads_are_drawn_and_few() -> None:
    spec = attnspec.parse(
        "attention a { heads 12 attend window(radius = head)"
        " head 0..5 { attend full } head 11 { attend linear() } }"
    )
    drawn = figure(spec.elaborated, 16, layer=0, head=None, inputs={}, width=80)
    assert [plot.where for plot in drawn.plots] == [
        "head 0..5",
        "head 6",
        "head 7",
        "head 8",
    ]
    assert len(drawn.plots) == MOST_PANELS
    assert drawn.footer == (
        "head 11: `linear` is a formula and has no pairs",
        "not drawn: head 9..10; --head chooses one",
    )
    one = figure(spec.elaborated, 16, layer=0, head=9, inputs={}, width=80)
    assert len(one.plots) == 1
    assert "head 9 of 12" in one.about


def test_a_formula_alone_has_no_picture() -> None:
    spec = attnspec.parse("attention a { attend linear() }")
    with pytest.raises(attnspec.SpecError, match="A707"):
        figure(spec.elaborated, 16, layer=0, head=None, inputs={}, width=80)


def test_other_layers_are_named() -> None:
    drawn = figure(example("swin").elaborated, 784, layer=0, head=None, inputs={}, width=80)
    assert drawn.footer == ("layer 1 differs; --layer 1 shows it",)


MIXED = "attention a { layers 3 heads 2 attend window(radius = 1) layer 0, 2 { attend linear() } }"


def test_layers_of_formulas_are_not_offered() -> None:
    drawn = figure(attnspec.parse(MIXED).elaborated, 8, layer=1, head=None, inputs={}, width=80)
    assert drawn.footer == ("layer 0, 2: formulas alone, without pairs",)
    result = CliRunner().invoke(main, ["show", "-", "-n", "8"], input=MIXED)
    assert result.exit_code == 0
    assert "layer 1 of 3" in result.stdout


def test_heads_of_one_graph_with_inputs_are_drawn_once() -> None:
    text = "attention a { heads 4 input d: ids attend same(d) head 3 { attend same(d) & causal } }"
    ids = np.array([0, 0, 1, 1])
    drawn = figure(
        attnspec.parse(text).elaborated, 4, layer=0, head=None, inputs={"d": ids}, width=80
    )
    assert [plot.where for plot in drawn.plots] == ["head 0..2", "head 3"]
    # those that are drawn head by head stay apart
    text = "attention a { heads 2 input d: ids attend same(d) & random(keys = 2) }"
    drawn = figure(
        attnspec.parse(text).elaborated, 4, layer=0, head=None, inputs={"d": ids}, width=80
    )
    assert [plot.where for plot in drawn.plots] == ["head 0", "head 1"]
