"""`docs/attnspec_in_100_lines.py` means what the package computes."""

from __future__ import annotations

import attnspec_in_100_lines as plain
import numpy as np
import pytest
import torch
from population import population, spec_of
from views import is_decided

from attnspec import Spec


def is_plain(spec: Spec) -> bool:
    """Whether softmax over one static mask is all there is."""
    (attend, *more), program = spec.program.attends, spec.program
    other = attend.mechanism or attend.scores or attend.scale or attend.normalize != "softmax"
    one = not (more or other or spec.inputs or program.cross or spec.heads or spec.layers > 1)
    return one and not is_decided(spec)


STATIC = [name for name, spec in population().items() if ":" in name and is_plain(spec)]


@pytest.mark.parametrize(
    ("graph", "body"),
    [
        (plain.window(before=3, after=1), "window(before = 3, after = 1)"),
        (plain.residue(4), "residue(step = 4)"),
        (plain.difference(plain.block(3), plain.window(0, 0)), "block(size = 3) - self"),
        (plain.transpose(plain.window(2, 0)), "transpose(window(before = 2, after = 0))"),
        (
            plain.causal(plain.union(plain.global_({0, 2}), plain.window(2, 2))),
            "causal & (global(positions(0, 2)) | window(radius = 2))",
        ),
    ],
)
def test_patterns_have_the_pairs_of_their_words(graph: plain.Graph, body: str) -> None:
    for n in (0, 1, 7, 20):
        assert np.array_equal(plain.mask(graph, n), spec_of(f"attend {body}").mask(n))


@pytest.mark.parametrize("name", STATIC)
def test_the_zoo_reaches_and_computes_the_same(name: str) -> None:
    spec = population()[name]
    n = spec.program.fixed_length or 20
    whole = spec.mask(n)
    pairs = plain.mask(lambda q, k, n: bool(whole[q, k]), n)
    if not spec.program.causal:
        assert plain.depth(pairs) == spec.analyse(n).depth
    q, k, v = torch.randn(3, 1, 1, n, 4, dtype=torch.float64)
    said = plain.attend(pairs, *(x[0, 0].numpy() for x in (q, k, v)))
    np.testing.assert_allclose(said, spec.compile()(q, k, v)[0, 0].numpy(), atol=1e-12)
