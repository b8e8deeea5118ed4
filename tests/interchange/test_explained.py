"""Masks explained: the spec that comes back for that of each spec, and what comes nearest."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import attnspec
from attnspec.interchange.explained import LONGEST, _on_grids, explain_mask
from attnspec.ir.program import leaves
from attnspec.text.diagnostics import AttnSpecError


def mask_of(text: str, n: int, **inputs: np.ndarray) -> np.ndarray:
    return attnspec.parse(f"attention a {{ {text} }}").mask(n, inputs=inputs or None)


def shown(mask: np.ndarray) -> str:
    found = explain_mask(mask)
    assert found.exact
    assert (found.spec.mask(len(mask), inputs=found.inputs) == mask).all()
    return " ".join(found.spec.source.split()).removeprefix("attention explained { ")[:-2]


DILATED = "dilated(radius = 6, step = 2)"

ALIKE = [
    "attend full",
    "attend self",
    "attend causal",
    "attend transpose(causal)",
    "attend ~causal",
    "attend ~self",
    "attend ~block(size = 8)",
    "causal attend ~block(size = 8)",
    "attend window(radius = 5)",
    "attend window(before = 7, after = 2)",
    "attend dilated(radius = 12, step = 3)",
    "attend residue(step = 7)",
    "attend strided(stride = 8)",
    "attend powers",
    "attend powers(base = 3)",
    "attend block(size = 8)",
    "attend block(size = 8, before = 1, after = 1) | global(first(8) | last(8))",
    "attend window(radius = 3) | global(first(2))",
    "attend window(radius = 2) | global(positions(0, 17, 40..42))",
    "attend window(radius = 2) | dilated(radius = 20, step = 4)",
    "attend causal | columns(first(9))",
    "attend summary(stride = 6, cells = 2)",
    "causal attend window(before = 9, after = 0) | columns(first(4))",
    "causal attend strided(stride = 8)",
    "causal attend block(size = 16)",
    "causal attend block(size = 8, before = 1)",
    "causal attend powers | columns(first(1))",
    "attend fixed(stride = 8, cells = 2)",
    "attend window(radius = 4) - self",
    "causal attend block(size = 16) & ~dilated(radius = 9, step = 3)",
    "attend ~global(first(3))",
    "attend rows(last(9))",
    "attend window(radius = 4) & columns(first(3))",
    "causal attend window(before = 9, after = 0) | columns(every(8))",
]
"""Specs that are found again as they are written."""

AROUND = [
    *("self", "transpose(causal)", "powers", "powers(base = 3)", "window(radius = 2)"),
    *("window(before = 4, after = 1)", "window(radius = 8)", "residue(step = 3)"),
    *("residue(step = 4)", "dilated(radius = 6, step = 2)", "block(size = 3)", "block(size = 7)"),
    *("block(size = 4, before = 1)", "columns(first(2))", "columns(positions(3, 8..9))"),
    *("columns(every(4))", "rows(last(3))", "rows(positions(2, 7))"),
]
"""Graphs of families that have a smallest member around a mask."""

INSIDE = [
    *("strided(stride = 4)", "global(first(1))", "global(positions(5))"),
    *("global(first(1) | last(2))", "summary(stride = 5, cells = 2)"),
    "fixed(stride = 4, cells = 1)",
]
"""Others, which have a largest member inside of it alone."""


def graphs_of(spec: attnspec.Spec) -> int:
    """How many graphs a spec is made of; `causal` beside them is one."""
    graph = spec.program.attends[0].graph
    assert graph is not None
    return len(list(leaves(graph))) + bool(spec.program.causal)


@pytest.mark.parametrize("text", ALIKE)
def test_a_spec_is_found_again(text: str) -> None:
    assert shown(mask_of(text, 61)) == text


@pytest.mark.parametrize(
    ("text", "n", "found"),
    [
        (
            "attend window(radius = 6) & residue(step = 2)",
            61,
            "attend dilated(radius = 6, step = 2)",
        ),
        ("causal attend full", 9, "attend causal"),
        ("causal attend full", 1, "attend full"),
        ("attend window(radius = 20) & block(size = 16)", 61, "attend block(size = 16)"),
        (
            "causal attend fixed(stride = 8, cells = 2)",
            61,
            "causal attend fixed(stride = 8, cells = 2)",
        ),
        ("sequence grid(6, 10) attend axial", 60, "attend block(size = 10) | residue(step = 10)"),
        (
            "sequence grid(6, 10) attend neighborhood(3, 5)",
            60,
            "sequence grid(6, 10) attend neighborhood(3, 5)",
        ),
        ("attend where(false)", 5, "attend where(false)"),
    ],
)
def test_the_shortest_is_found(text: str, n: int, found: str) -> None:
    assert shown(mask_of(text, n)) == found


@pytest.mark.parametrize("op", ["|", "&", "-", "~"])
def test_two_graphs_are_found_in_no_more_of_them(op: str) -> None:
    for seed in range(20):
        draw = random.Random(seed)
        one, other = draw.sample(AROUND + INSIDE if op == "|" else AROUND, 2)
        text = f"~{one}" if op == "~" else f"{one} {op} {other}"
        spec = attnspec.parse(f"attention a {{ {draw.choice(('', 'causal '))}attend {text} }}")
        mask = spec.mask(14)
        if mask.any():
            found = explain_mask(mask)
            assert found.exact, spec.source
            assert (found.spec.mask(14) == mask).all(), spec.source
            # beside a graph that is left out `causal` is none more
            most = graphs_of(spec) + (op == "~")
            assert graphs_of(found.spec) <= most, (spec.source, found.spec.source)


@pytest.mark.parametrize("rest", ["attend same(d)", "causal attend same(d)"])
def test_documents_become_an_input(rest: str) -> None:
    labels = np.repeat(np.arange(5), [3, 20, 7, 30, 1])
    mask = mask_of(f"input d: ids {rest}", 61, d=labels)
    found = explain_mask(mask)
    assert found.exact
    assert (found.inputs["document"] == labels).all()
    assert rest.replace("(d)", "(document)") in " ".join(found.spec.source.split())


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_short_masks_are_explained(n: int) -> None:
    for code in range(2 ** (n * n) if n < 3 else 40):
        mask = np.array([bool(code >> bit & 1) for bit in range(n * n)], bool)
        mask = mask.reshape(n, n)
        found = explain_mask(mask)
        differ = found.spec.mask(n, inputs=found.inputs or None) ^ mask
        assert differ.sum() == found.only_in_spec.count + found.only_in_mask.count
        assert found.exact == (not differ.any())


def test_what_is_nearest_says_how_near() -> None:
    mask = mask_of("attend window(before = 9, after = 0)", 61)
    mask[40, 3], mask[22, 21] = True, False
    found = explain_mask(mask)
    assert not found.exact
    assert found.only_in_spec.examples == ((22, 21),)
    assert found.only_in_mask.examples == ((40, 3),)
    assert "1 pairs too many and 1 too few" in str(found)
    assert "only in the spec: (22, 21)\nonly in the mask: (40, 3)\n" in str(found)
    assert "attend window(before = 9, after = 0)" in str(found)


def test_documents_with_holes_come_nearest_by_themselves() -> None:
    mask = mask_of("input d: ids attend same(d)", 61, d=np.repeat(np.arange(3), [11, 20, 30]))
    holes = [15, 20, 28, 33, 40, 47, 55], [20, 15, 12, 50, 58, 36, 31]
    mask[holes] = False
    found = explain_mask(mask)
    assert "attend same(document)" in map(str.strip, found.spec.source.splitlines())
    assert found.only_in_spec.count == 7
    assert not found.only_in_mask


def test_a_rule_is_found_under_noise() -> None:
    text = "attend window(radius = 5) | global(first(4))"
    noise = np.random.default_rng(5).random((96, 96)) < 0.002
    found = explain_mask(mask_of(text, 96) ^ noise)
    assert not found.exact
    assert text.partition("attend ")[2] in " ".join(found.spec.source.split())
    assert found.only_in_spec.count + found.only_in_mask.count <= noise.sum()


def test_the_search_takes_the_same_way_each_time() -> None:
    mask = np.random.default_rng(3).random((40, 40)) < 0.3
    assert str(explain_mask(mask)) == str(explain_mask(mask.copy()))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (np.ones(4, bool), r"\[n, n\]"),
        (np.ones((3, 4), bool), "one that says `cross`"),
        (np.tri(4, dtype=int), "`mask != 0` of one in which 1 attends"),
        (np.ones((2, 3, 4, 4), bool), r"`mask\[0, 0\]`"),
        (np.ones((4, 4)), "mask == 0"),
        (np.ones((2, 4, 4), bool), "one head"),
        (np.ones((LONGEST + 1, LONGEST + 1), bool), "a smaller one"),
    ],
)
def test_what_is_no_mask_is_refused(mask: np.ndarray, words: str) -> None:
    with pytest.raises(AttnSpecError, match=words):
        explain_mask(mask)


@pytest.mark.parametrize("reach", [(0, 2), (1, 0), (1, 3)])
def test_a_box_on_a_grid_is_as_small_as_its_pairs(reach: tuple[int, int]) -> None:
    near = f"abs(q.row - k.row) <= {reach[0]} and abs(q.col - k.col) <= {reach[1]}"
    lines = "sequence grid(4, 7)", f"attend where({near})"
    mask = attnspec.parse(f"attention a {{ {' '.join(lines)} }}").mask(28)
    found = {one.lines: one.mask for one in _on_grids(mask)}
    assert np.array_equal(found[lines], mask)


def test_masks_of_every_kind_are_explained_alike() -> None:
    held = mask_of("attend window(radius = 3)", 32)
    near = create_block_mask(lambda b, h, q, k: (q - k).abs() <= 3, 1, 1, 32, 32, "cpu")
    for mask in (held, held.tolist(), held[None, None], torch.from_numpy(held), near):
        found = explain_mask(mask)
        assert (found.exact, found.n) == (True, 32)
        assert "window(radius = 3)" in found.spec.source
    for wrong in (True, held[0], held[0].tolist(), lambda b, h, q, k: q >= k):
        with pytest.raises(AttnSpecError, match=r"a mask \[n, n\] is needed"):
            explain_mask(wrong)
