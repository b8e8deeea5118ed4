"""Masks explained: the spec that comes back for that of each spec, and what comes nearest."""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import attnspec
from attnspec import AttnSpecError, Explanation, explain_mask
from attnspec.graphs.patterns import PATTERNS


def mask_of(text: str, n: int, **inputs: np.ndarray) -> np.ndarray:
    return attnspec.parse(f"attention a {{ {text} }}").mask(n, inputs=inputs or None)


def text_of(found: Explanation) -> str:
    return " ".join(found.spec.source.split()).removeprefix("attention explained { ")[:-2]


ALIKE = """attend full; attend self; attend causal; attend transpose(causal); attend ~causal
attend ~self; attend ~block(size = 8); causal attend ~block(size = 8); attend window(radius = 5)
attend window(before = 7, after = 2); attend dilated(radius = 12, step = 3); attend powers
attend residue(step = 7); attend strided(stride = 8); attend powers(base = 3)
attend block(size = 8); attend summary(stride = 6, cells = 2); attend fixed(stride = 8, cells = 2)
attend block(size = 8, before = 1, after = 1) | global(first(8) | last(8)); attend rows(last(9))
attend window(radius = 3) | global(first(2)); attend window(radius = 4) & columns(first(3))
attend window(radius = 2) | global(positions(0, 17, 40..42)); attend causal | columns(first(9))
attend window(radius = 2) | dilated(radius = 20, step = 4); attend window(radius = 4) - self
attend ~global(first(3)); causal attend strided(stride = 8); causal attend block(size = 16)
causal attend window(before = 9, after = 0) | columns(first(4)); causal attend powers(base = 5)
causal attend block(size = 8, before = 1); causal attend powers | columns(first(1))
causal attend block(size = 16) & ~dilated(radius = 9, step = 3)
causal attend window(before = 9, after = 0) | columns(every(8))"""
"""Specs that are found again as they are written."""

BOXES = "sequence grid(6, 10) attend neighborhood(3, 5)"
SHORTER = [
    ("attend window(radius = 6) & residue(step = 2)", 61, "attend dilated(radius = 6, step = 2)"),
    ("causal attend full", 9, "attend causal"),
    ("causal attend full", 1, "attend full"),
    ("attend window(radius = 20) & block(size = 16)", 61, "attend block(size = 16)"),
    (
        "causal attend fixed(stride = 8, cells = 2)",
        61,
        "causal attend fixed(stride = 8, cells = 2)",
    ),
    ("sequence grid(6, 10) attend axial", 60, "attend block(size = 10) | residue(step = 10)"),
    (BOXES, 60, BOXES),
    ("attend where(false)", 5, "attend where(false)"),
]


@pytest.mark.parametrize(
    ("text", "n", "wanted"), [*((x, 61, x) for x in re.split("[;\n] *", ALIKE)), *SHORTER]
)
def test_the_shortest_spec_is_found(text: str, n: int, wanted: str) -> None:
    found = explain_mask(mask_of(text, n))
    assert found.exact
    assert text_of(found) == wanted
    assert (found.spec.mask(n, inputs=found.inputs) == mask_of(text, n)).all()


AROUND = """self; transpose(causal); powers; powers(base = 3); window(radius = 2); block(size = 3)
window(before = 4, after = 1); window(radius = 8); residue(step = 3); residue(step = 4)
dilated(radius = 6, step = 2); block(size = 7); block(size = 4, before = 1); columns(first(2))
columns(positions(3, 8..9)); columns(every(4)); rows(last(3)); rows(positions(2, 7))"""
"""Graphs of families that have a smallest member around a mask."""

INSIDE = """; strided(stride = 4); global(first(1)); global(positions(5))
summary(stride = 5, cells = 2)
global(first(1) | last(2)); fixed(stride = 4, cells = 1)"""
"""Others, which have a largest member inside of it alone."""

NAMES = "|".join(each.name for each in PATTERNS)
SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40)]


@pytest.mark.parametrize("seed", [*range(4), *SLOW])
@pytest.mark.parametrize("op", ["|", "&", "-", "~"])
def test_two_graphs_are_found_in_no_more_of_them(op: str, seed: int) -> None:
    draw = random.Random(seed)
    graphs = re.split("[;\n] *", AROUND + INSIDE if op == "|" else AROUND)
    one, other = draw.sample([x for x in graphs if x], 2)
    graph = f"~{one}" if op == "~" else f"{one} {op} {other}"
    text = f"{draw.choice(('', 'causal '))}attend {graph}"
    mask = mask_of(text, 14)
    if mask.any():
        found = explain_mask(mask)
        assert found.exact, text
        assert (found.spec.mask(14) == mask).all(), text
        # beside a graph that is left out `causal` is none more
        counts = [len(re.findall(rf"\b({NAMES})\b", x)) for x in (text_of(found), text)]
        assert counts[0] <= counts[1] + (op == "~"), (text, found.spec.source)


@pytest.mark.parametrize("rest", ["attend same(d)", "causal attend same(d)"])
def test_documents_become_an_input(rest: str) -> None:
    labels = np.repeat(np.arange(5), [3, 20, 7, 30, 1])
    found = explain_mask(mask_of(f"input d: ids {rest}", 61, d=labels))
    assert found.exact
    assert (found.inputs["document"] == labels).all()
    assert rest.replace("(d)", "(document)") in text_of(found)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_short_masks_are_explained(n: int) -> None:
    for code in range(2 ** (n * n)) if n < 3 else range(7, 512, 60):
        mask = np.array([bool(code >> bit & 1) for bit in range(n * n)], bool).reshape(n, n)
        found = explain_mask(mask)
        differ = found.spec.mask(n, inputs=found.inputs or None) ^ mask
        assert differ.sum() == found.only_in_spec.count + found.only_in_mask.count
        assert found.exact == (not differ.any())


def test_what_is_nearest_says_how_near() -> None:
    text = "attend window(before = 9, after = 0)"
    mask = mask_of(text, 61)
    mask[40, 3], mask[22, 21] = True, False
    found = explain_mask(mask)
    assert not found.exact
    assert found.only_in_spec.examples == ((22, 21),)
    assert found.only_in_mask.examples == ((40, 3),)
    for words in (
        text,
        "1 pairs too many and 1 too few",
        "only in the spec: (22, 21)\nonly in the",
    ):
        assert words in str(found)
    # the search takes the same way each time
    assert str(explain_mask(mask.copy())) == str(found)


def test_rules_are_found_under_holes_and_noise() -> None:
    mask = mask_of("input d: ids attend same(d)", 61, d=np.repeat(np.arange(3), [11, 20, 30]))
    mask[[15, 20, 28, 33, 40, 47, 55], [20, 15, 12, 50, 58, 36, 31]] = False
    found = explain_mask(mask)
    assert "attend same(document)" in text_of(found)
    assert (found.only_in_spec.count, found.only_in_mask.count) == (7, 0)
    text = "attend window(radius = 5) | global(first(4))"
    noise = np.random.default_rng(5).random((96, 96)) < 0.002
    found = explain_mask(mask_of(text, 96) ^ noise)
    assert not found.exact
    assert text.partition("attend ")[2] in text_of(found)
    assert found.only_in_spec.count + found.only_in_mask.count <= noise.sum()


@pytest.mark.parametrize("reach", [(0, 2), (1, 0), (1, 3)])
def test_boxes_on_a_grid_are_found(reach: tuple[int, int]) -> None:
    near = f"abs(q.row - k.row) <= {reach[0]} and abs(q.col - k.col) <= {reach[1]}"
    mask = mask_of(f"sequence grid(4, 7) attend where({near})", 28)
    found = explain_mask(mask)
    assert found.exact
    assert (found.spec.mask(28) == mask).all()


def test_masks_of_every_kind_are_explained_alike() -> None:
    mask = mask_of("attend window(radius = 3)", 32)
    blocks = create_block_mask(lambda b, h, q, k: (q - k).abs() <= 3, 1, 1, 32, 32, "cpu")
    for form in (mask, mask.tolist(), mask[None, None], torch.from_numpy(mask), blocks):
        found = explain_mask(form)
        assert (found.exact, found.n) == (True, 32)
        assert "window(radius = 3)" in found.spec.source


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (np.ones(4, bool), r"\[n, n\]"),
        (np.ones((3, 4), bool), "one that says `cross`"),
        (np.tri(4, dtype=int), "`mask != 0` of one in which 1 attends"),
        (np.ones((2, 3, 4, 4), bool), r"`mask\[0, 0\]`"),
        (np.ones((4, 4)), "mask == 0"),
        (np.ones((2, 4, 4), bool), "one head"),
        (np.ones((513, 513), bool), "a smaller one"),
        (True, r"a mask \[n, n\] is needed"),
        ([True], r"a mask \[n, n\] is needed"),
        (lambda b, h, q, k: q >= k, r"a mask \[n, n\] is needed"),
    ],
)
def test_what_is_no_mask_is_refused(mask: Any, words: str) -> None:
    with pytest.raises(AttnSpecError, match=words):
        explain_mask(mask)
