"""Stacks of graphs and mechanisms: counts of the graph heads, reach of all, against masks."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from attention_checks import spec_of

from attnspec.analysis.growth.stable import difference, difference_of
from attnspec.analysis.report.inquiry import GRAPH_HEADS
from attnspec.spec import Spec

GRAPHS = (
    "window(radius = 1)",
    "dilated(radius = 6, step = 3)",
    "residue(step = 4)",
    "columns(first(2))",
    "random(keys = 2, seed = 3)",
    "self",
)
ANY = ("linear()", "favor(features = 4)", "linear() + window(radius = 1)")
BOTH_WAYS = ("fourier()", "nystrom(landmarks = 2)", "mixer(hidden = 4, max_length = 64)")
N = 13


def stack_of(seed: int) -> tuple[Spec, list[list[str]]]:
    """One to three layers of one to three heads, one of which at least is a mechanism."""
    source = random.Random(seed)
    causal = seed % 3 == 0
    mechanisms = ANY if causal else (*ANY, *BOTH_WAYS)
    layers, heads = source.randint(1, 3), source.randint(1, 3)
    bodies = [
        [source.choice(GRAPHS if source.random() < 0.6 else mechanisms) for _ in range(heads)]
        for _ in range(layers)
    ]
    bodies[source.randrange(layers)][source.randrange(heads)] = source.choice(mechanisms)
    text = " ".join(
        f"layer {at} {{ {' '.join(f'head {h} {{ attend {one} }}' for h, one in enumerate(row))} }}"
        for at, row in enumerate(bodies)
    )
    head = f"{'causal ' if causal else ''}layers {layers} heads {heads} "
    return spec_of(head + text), bodies


@pytest.mark.parametrize("seed", range(24))
def test_counts_are_those_of_the_masks_of_graph_heads(seed: int) -> None:
    spec, bodies = stack_of(seed)
    report = spec.analyse(N)
    masks = {
        (layer, head): spec.mask(N, layer, head)
        for layer, row in enumerate(bodies)
        for head, body in enumerate(row)
        if body in GRAPHS
    }
    assert report.edges is None
    assert set(report.per_head) == set(masks)
    for slot, mask in masks.items():
        assert report.per_head[slot].edges == mask.sum()
        assert report.per_head[slot].readers == mask.sum(0).max()
    data = report.to_dict()["figures"]
    assert json.loads(report.to_json())["figures"] == data
    if not masks:
        assert not set(GRAPH_HEADS) & set(data)
        assert report.graph_edges is None
        return
    assert report.graph_edges == sum(mask.sum() for mask in masks.values())
    assert report.graph_density == pytest.approx(np.mean(list(masks.values())))
    degrees = np.stack([mask.sum(1) for mask in masks.values()])
    assert report.graph_degree == degrees.max()
    assert report.graph_min_degree == degrees.min()
    assert data["graph_edges"]["value"] == report.graph_edges
    note = data["graph_edges"]["note"]
    assert note.startswith("graph heads only: ")
    assert note in str(report)
    assert note in report._repr_html_()


@pytest.mark.parametrize("seed", range(24))
def test_reach_takes_mechanisms_for_every_position(seed: int) -> None:
    spec, bodies = stack_of(seed)
    report = spec.analyse(N)
    full = np.tri(N, dtype=bool) if spec.program.causal else np.ones((N, N), bool)
    unions = [
        np.logical_or.reduce(
            [spec.mask(N, layer, head) if body in GRAPHS else full for head, body in enumerate(row)]
        )
        | np.eye(N, dtype=bool)
        for layer, row in enumerate(bodies)
    ]
    known = np.eye(N, dtype=bool)
    hops = np.where(known, 0, -1)
    for depth in range(1, 4 * N):
        # layer by layer from below: what a position knows is what those it reads knew
        known = unions[min(depth, len(unions)) - 1] @ known
        hops[(hops < 0) & known] = depth
    assert (hops[full] >= 0).all()
    assert report.depth == hops[full].max()
    for query in (0, 5, N - 1):
        found = report.hops(query)
        mine = np.arange(N) == query
        assert (np.where(mine, 0, found) == hops[query])[full[query]].all()
    # some head reads everything, so that the union of all heads does
    assert (report.diameter, report.path_length) == (1, 1.0)
    assert report.quality["depth"] == "exact"
    data = report.to_dict()["figures"]
    for name in ("depth", "diameter", "path_length"):
        wanted = "every position up to its own" if spec.program.causal else "every position"
        assert data[name]["note"].endswith(wanted)


def test_a_stack_of_graphs_has_its_own_figures() -> None:
    report = spec_of("layers 2 attend window(radius = 1)").analyse(N)
    assert not set(GRAPH_HEADS) & set(report.to_dict()["figures"])
    assert report.graph_edges == report.edges
    assert report.graph_density == report.density
    assert (report.graph_degree, report.graph_min_degree) == (report.degree, report.min_degree)


def test_no_positions_and_unknown_graphs() -> None:
    body = "heads 2 head 0 { attend linear() } head 1 { attend window(radius = 1) }"
    empty = spec_of(body).analyse(0)
    assert (empty.graph_edges, empty.graph_density, empty.graph_degree) == (0, 0.0, 0)
    read = spec_of("heads 2 input x: ids head 0 { attend linear() } head 1 { attend same(x) }")
    assert read.analyse(4).graph_edges is None
    assert read.analyse(4, inputs={"x": np.array([0, 0, 1, 1])}).graph_edges == 8


@pytest.mark.parametrize("causal", ["", "causal "])
@pytest.mark.parametrize("body", [*ANY, *BOTH_WAYS])
def test_rows_of_a_mechanism_differ_where_it_mixes_later_positions(body: str, causal: str) -> None:
    if causal and body in BOTH_WAYS:
        return
    program = spec_of(f"{causal}attend {body}").program
    for longest in (1, 2, 9):
        found = difference(program, longest)
        # of positions that both lengths have a mechanism reads the same
        assert (found is None) == (bool(causal) or longest == 1)
        if found is None:
            continue
        allowed = {n: np.ones((n, n), bool) for n in (found.shorter, found.longer)}
        assert found.reads
        assert allowed[found.longer][found.query, found.key]
        assert found.query < found.shorter <= found.key < found.longer <= longest
        assert found.what == "query 0 reads the later key 1 at n = 2, but not at n = 1"
        assert (found.layer, found.head) == (0, 0)
        assert difference_of(program, 0, 0, longest) == found
