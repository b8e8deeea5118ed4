"""Specs, plans and pictures where a notebook or `print` shows them."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

import attnspec
from attnspec.cli import main
from attnspec.show.notebook import SHORT
from attnspec.text.diagnostics import AttnSpecError

TEXT = """attention a(r = 3) {
    causal
    heads 2
    attend window(before = r, after = 0)
    head 1 { attend residue(step = 4) | self }
}
"""
INPUT = "attention a { input x: tokens attend global(x) | self }"


def words(html: str) -> str:
    return unescape(re.sub(r"<[^>]*>", " ", html))


def test_print_shows_the_text() -> None:
    spec = attnspec.parse(TEXT)
    assert str(spec) == spec.source
    assert attnspec.parse(str(spec)) == spec
    assert repr(spec) == "<Spec a, r=3>"


def test_show_is_the_picture_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.attn").write_text(TEXT)
    spec = attnspec.load(tmp_path / "a.attn")
    asked: list[tuple[int, dict[str, Any]]] = [(24, {}), (24, {"head": 1})]
    for n, options in [*asked, (200, {"layer": 0, "head": 0})]:
        given = [f"--{name}={value}" for name, value in options.items()]
        command = ["show", str(tmp_path / "a.attn"), "-n", str(n), *given]
        done = CliRunner().invoke(main, command, env={"COLUMNS": "80"})
        assert done.exit_code == 0, done.output
        text = str(spec.show(n, **options))
        assert text.splitlines()[:4] == done.stdout.splitlines()[:4]
    for suffix in ("svg", "html"):
        saved, written = tmp_path / f"s.{suffix}", tmp_path / f"w.{suffix}"
        spec.show(24).save(saved)
        command = ["show", str(tmp_path / "a.attn"), "-n", "24", "-o", str(written)]
        assert CliRunner().invoke(main, command).exit_code == 0
        assert saved.read_text("utf-8") == written.read_text("utf-8")
    spec.show(24).save(tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"\.png, \.svg or \.html, got 's\.pdf'"):
        spec.show(24).save("s.pdf")


def test_a_picture_draws_itself() -> None:
    picture = attnspec.parse(TEXT).show(12)
    root = ElementTree.fromstring(picture._repr_svg_())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "n = 12" in "".join(root.itertext())


@pytest.mark.parametrize(
    ("text", "n"),
    [
        (TEXT, SHORT),
        ("attention a { sequence grid(3, 5) attend axial }", 15),
        ("attention a { causal attend window(before = 3, after = 0) + linear() }", SHORT),
        ("attention a { attend topk(keys = 3) }", SHORT),
    ],
)
def test_a_spec_draws_itself_at_a_length_that_it_has(text: str, n: int) -> None:
    spec = attnspec.parse(text)
    svg = spec._repr_svg_()
    assert svg is not None
    assert f"n = {n}" in "".join(ElementTree.fromstring(svg).itertext())
    html = spec._repr_html_()
    assert svg in html
    assert spec.source in words(html)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (INPUT, "needs its input `x`"),
        ("attention a { attend favor() }", "favor"),
        ("attention a { attend window(radius = 100 - n * 2) }", "radius"),
    ],
)
def test_a_spec_without_a_drawing_says_why(text: str, reason: str) -> None:
    spec = attnspec.parse(text)
    assert spec._repr_svg_() is None
    shown = words(spec._repr_html_())
    assert "Not drawn: " in shown
    assert reason in shown
    assert spec.source in shown


def test_show_takes_inputs_and_refuses_what_is_not_there() -> None:
    spec = attnspec.parse(INPUT)
    marked = np.zeros(16, bool)
    marked[3] = True
    assert "█" in str(spec.show(16, inputs={"x": marked}))
    refused: list[tuple[dict[str, Any], str]] = [
        ({"n": 16}, "needs its input `x`"),
        ({"n": -1, "inputs": {"x": marked}}, "-1"),
        ({"n": 16, "layer": 1, "inputs": {"x": marked}}, "layer must be between 0 and 0, got 1"),
        ({"n": 16, "head": 2, "inputs": {"x": marked}}, "head must be between 0 and 0, got 2"),
    ]
    for wrong, reason in refused:
        with pytest.raises(AttnSpecError, match=reason):
            spec.show(**wrong)
    with pytest.raises(AttnSpecError, match="20"):
        attnspec.parse("attention a { sequence grid(4, 5) attend axial }").show(21)


def test_plans_and_reports_are_tables() -> None:
    spec = attnspec.parse(TEXT)
    plan = spec.plan(100)
    root = ElementTree.fromstring(plan._repr_html_())
    assert root.tag == "table"
    cells = [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]
    for row, (layers, heads, backend, said) in zip(plan.rows(), cells[1:], strict=True):
        assert (row.layers, row.heads, row.backend) == (layers, heads, backend)
        assert said.startswith(row.said)
    # what is said in the table is said in the text
    text = str(plan)
    assert all(row.said in text for row in plan.rows())
    assert "<table" in spec.analyse(100)._repr_html_()
