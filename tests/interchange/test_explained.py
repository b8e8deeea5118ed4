"""Masks explained: the spec that comes back for that of each spec, and what comes nearest."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch
from goldens import Golden
from sweeps import few
from torch.nn.attention.flex_attention import create_block_mask

import attnspec
from attnspec import Explanation, explain_mask
from attnspec.graphs.patterns import PATTERNS


def mask_of(text: str, n: int, **inputs: np.ndarray) -> np.ndarray:
    return attnspec.parse(f"attention a {{ {text} }}").mask(n, inputs=inputs or None)


def text_of(found: Explanation) -> str:
    return " ".join(found.spec.source.split()).removeprefix("attention explained { ")[:-2]


LABELS = np.repeat(np.arange(5), [3, 20, 7, 30, 1])


def pairs(*pairs: tuple[int, int], n: int = 61) -> np.ndarray:
    found = np.zeros((n, n), bool)
    found[tuple(np.transpose(pairs))] = True
    return found


def test_masks_become_the_approved_specs(golden: Golden) -> None:
    """The text that is found for each mask of the file, how near it comes, or why there is none."""

    def ask(text: str) -> tuple[str, object]:
        found = explain_mask(mask := eval(text, globals()))
        if not found.exact:
            # the search takes the same way each time
            assert str(explain_mask(mask.copy())) == str(found)
            return "near", found
        assert (found.spec.mask(len(mask), inputs=found.inputs) == mask).all()
        return "exact", "\n".join(found.spec.source.splitlines()[1:-1])

    golden.calls(ask)


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


@pytest.mark.parametrize("seed", few(range(40), range(4)))
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


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_short_masks_are_explained(n: int) -> None:
    for code in range(2 ** (n * n)) if n < 3 else range(7, 512, 60):
        mask = np.array([bool(code >> bit & 1) for bit in range(n * n)], bool).reshape(n, n)
        found = explain_mask(mask)
        differ = found.spec.mask(n, inputs=found.inputs or None) ^ mask
        assert differ.sum() == found.only_in_spec.count + found.only_in_mask.count
        assert found.exact == (not differ.any())


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


def test_masks_of_every_kind_are_explained_alike() -> None:
    mask = mask_of("attend window(radius = 3)", 32)
    blocks = create_block_mask(lambda b, h, q, k: (q - k).abs() <= 3, 1, 1, 32, 32, "cpu")
    for form in (mask, mask.tolist(), mask[None, None], torch.from_numpy(mask), blocks):
        found = explain_mask(form)
        assert (found.exact, found.n) == (True, 32)
        assert "window(radius = 3)" in found.spec.source
