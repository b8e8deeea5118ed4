"""Claims that mention `layer` or `head` hold for each, or name one for which they do not."""

from __future__ import annotations

import operator
import re
from itertools import product

import networkx
import numpy as np
import pytest
from random_specs import claims_text
from sweeps import thinned

from attnspec.check.verdicts import Verdict
from attnspec.graphs.bind import bind_attended
from attnspec.ir.program import Claim
from attnspec.spec import Spec, parse

COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}


def verdict(body: str, claim: str) -> Verdict:
    (only,) = parse(f"attention a {{ {body} require {claim} }}").verdicts
    return only


def message(body: str, claim: str) -> str:
    """What is wrong with a claim."""
    (only,) = verdict(body, claim).diagnostics
    return only.message


# --- against the definition ---------------------------------------------------------------------


def slots(spec: Spec) -> list[tuple[int, int]]:
    return list(product(range(spec.layers), range(spec.heads or 1)))


def longest_path(union: np.ndarray, causal: bool) -> float:
    n = len(union)
    graph: networkx.DiGraph[int] = networkx.DiGraph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from(zip(*(side.tolist() for side in np.nonzero(union)), strict=True))
    paths = dict(networkx.all_pairs_shortest_path_length(graph))
    allowed = [(q, k) for q, k in product(range(n), range(n)) if k <= q or not causal]
    return float(max(paths[q].get(k, np.inf) for q, k in allowed))


def layers_needed(spec: Spec, n: int) -> float:
    allowed = np.tri(n, dtype=bool) if spec.program.causal else np.ones((n, n), bool)
    reached = np.eye(n, dtype=bool)
    for layer in range(n + spec.layers + 1):
        if reached[allowed].all():
            return layer
        at = min(layer, spec.layers - 1)
        graph = np.logical_or.reduce([spec.mask(n, at, h) for h in range(spec.heads or 1)])
        reached = reached | (graph.astype(int) @ reached.astype(int) > 0)
    return np.inf


def holds(spec: Spec, claim: Claim, n: int) -> dict[tuple[int, int], bool]:
    """Whether a claim holds in each layer and head, by masks and the text of its number."""
    found = {}
    masks = {slot: spec.mask(n, *slot) for slot in slots(spec)}
    whole = {
        "depth": lambda: layers_needed(spec, n),
        "diameter": lambda: longest_path(
            np.logical_or.reduce(list(masks.values())), spec.program.causal
        ),
    }
    known = whole[claim.kind]() if claim.kind in whole else np.inf
    number = claim.text.split(claim.compare)[1] if claim.compare else ""
    for layer, head in slots(spec):
        if claim.terms:
            at = spec.stack().situation(n, layer, head)
            i = np.arange(n)
            first, second = (
                np.broadcast_to(bind_attended(term, at).holds(i[:, None], i[None], n), (n, n))
                for term in claim.terms
            )
            same = claim.kind == "=="
            found[layer, head] = bool((first == second if same else ~first | second).all())
            continue
        asked = (
            (layer if "layer" in number else None),
            (head if "head" in number else None),
        )
        part = [
            mask
            for (own_layer, own_head), mask in masks.items()
            if asked[0] in (None, own_layer) and asked[1] in (None, own_head)
        ]
        figure = {
            "edges": lambda part=part: sum(int(mask.sum()) for mask in part),
            "degree": lambda part=part: max(int(mask.sum(axis=1).max()) for mask in part),
            "density": lambda part=part: float(np.mean([mask.mean() for mask in part])),
        }.get(claim.kind, lambda: known)()
        bound = eval(number, {"n": n, "layer": layer, "head": head})
        if claim.kind == "density" and abs(figure - bound) < 1e-9:
            figure = bound
        # of pairs that are never joined nothing is said
        compared = COMPARE[claim.compare or "=="](figure, bound)
        found[layer, head] = compared and figure < np.inf
    return found


@pytest.mark.parametrize("seed", thinned(range(60)))
def test_random_claims_by_head_and_layer(seed: int) -> None:
    n = (1, 2, 5, 9, 12)[seed % 5]
    spec = parse(claims_text(seed, n))
    for found in spec.verdicts:
        claim = found.claim
        truth = holds(spec, claim, n)
        if claim.at is None and found.status != "proven":
            continue
        if found.status in ("proven", "checked"):
            assert all(truth.values()), (spec.source, claim.text)
            continue
        assert found.status == "refuted", (spec.source, claim.text)
        wrong = [slot for slot, true in truth.items() if not true]
        assert wrong, (spec.source, claim.text)
        (diagnostic,) = found.diagnostics
        said = diagnostic.message.split(": ")[0]
        layer, head = (re.search(rf"{what} (\d+)", said) for what in ("layer", "head"))
        assert (layer is not None) == ("layer" in claim.text or "random" in claim.text)
        named = [
            slot
            for slot in wrong
            if (layer is None or int(layer[1]) == slot[0])
            and (head is None or int(head[1]) == slot[1])
        ]
        assert named, (spec.source, diagnostic.message)


def test_the_random_claims_are_of_every_kind() -> None:
    seen = {
        (found.claim.kind, found.status)
        for seed in range(60)
        for found in parse(claims_text(seed, 5)).verdicts
    }
    kinds = ("subset", "==", "degree", "edges", "density", "depth", "diameter")
    assert {(kind, "refuted") for kind in kinds} <= seen
    assert {(kind, "checked") for kind in kinds[2:]} <= seen
    assert ("subset", "proven") in seen


# --- what is said ---------------------------------------------------------------------------------

WIDER = "heads 4 attend window(radius = 3 * head)"


def test_each_head_is_compared_with_its_own_number() -> None:
    assert verdict(WIDER, "degree <= 6 * head + 1").status == "checked"
    assert verdict(WIDER, "degree == 6 * head + 1 at n = 64").status == "checked"
    assert message(WIDER, "degree <= 4 * (head + 1)") == (
        "`degree <= 4 * (head + 1)` does not hold at n = 64 in head 2: degree is 13, must be"
        " <= 12; for example query 6 reads 0..12 in head 2"
    )


def test_a_layer_is_that_of_all_its_heads_and_a_head_that_of_all_layers() -> None:
    body = "layers 3 heads 2 attend self head 1 { attend window(radius = layer) }"
    assert verdict(body, "degree == 2 * layer + 1 at n = 9").status == "checked"
    assert verdict(body, "degree == 4 * head + 1 at n = 9").status == "checked"
    assert "in layer 2, head 0: degree is 1, must be == 5" in message(
        body, "degree == 2 * layer + 1 + 0 * head at n = 9"
    )
    assert verdict(body, "edges == 3 * n + head * (6 * n - 8) at n = 9").status == "checked"
    # products of all pairs: 4 d operations each, heads of size 64
    costs = "layers 2 heads 2 layer 0 { head 0 { attend full } head 1 { attend self } }"
    costs += " layer 1 { attend full }"
    own = "flops == 4 * 64 * (n ** 2 + n + layer * (n ** 2 - n)) at n = 512"
    assert verdict(costs, own).status == "checked"
    assert "in layer 1: flops are 134,217,728" in message(
        costs, own.replace("layer", "(layer // 2)")
    )


def test_graphs_are_compared_in_every_layer_and_head() -> None:
    assert verdict(WIDER, "window(radius = head) subset full").status == "proven"
    assert verdict(WIDER, "window(radius = head) subset window(radius = 3)").status == "proven"
    assert "at n = 64 in head 3: (0, 3) is only in the first" in message(
        WIDER, "window(radius = head) subset window(radius = 2)"
    )
    both = "layers 3 heads 2 attend full"
    assert "in layer 2, head 1: " in message(
        both, "window(radius = layer + head) subset window(radius = 2)"
    )


def test_draws_of_a_claim_are_those_of_every_head() -> None:
    body = "heads 3 attend full"
    claim = "random(keys = 2, seed = 5) subset random(keys = 2, seed = 5) | self"
    assert verdict(body, claim).status == "proven"
    alone = "random(keys = 2, seed = 5) subset random(keys = 2, seed = 5, per_head = false)"
    # the draws of all heads are those of none
    assert verdict(body, f"{alone} at n = 9").status == "refuted"


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        ("reach(layers = 2 - head) at n = 9", "at n = 9 in head 2: after 0 layers query 0"),
        ("depth <= 2 - head at n = 9", "at n = 9 in head 2: depth is 2, must be <= 0"),
        ("depth >= 1 + head at n = 9", "at n = 9 in head 2: depth is 2, must be >= 3"),
        ("depth == 2 + head // 2 at n = 9", "at n = 9 in head 2: depth is 2, must be == 3"),
        ("depth != 4 - head at n = 9", "at n = 9 in head 2: depth is 2, must be != 2"),
        ("order <= n ** (2 - head)", "edges over the bound grow in head 2"),
        ("degree <= 9 // head at n = 9", "division by zero in head 0"),
        ("residue(step = head) subset full", "at n = 1 in head 0"),
    ],
)
def test_what_fails_names_its_head(claim: str, words: str) -> None:
    body = "heads 3 attend window(radius = 1) | global(first(1))"
    found = message(body, claim)
    assert words in found


def test_proofs_of_reach_are_of_every_head() -> None:
    body = "heads 3 attend full"
    assert verdict(body, "depth <= 1 + head").status == "proven"
    assert verdict(body, "depth <= 2 - head at n = 9").status == "refuted"


def test_without_heads_nothing_is_said_of_each_of_them() -> None:
    alone = "attend window(radius = 3 * head)"
    assert "does not declare how many `heads`" in message("attend full", "degree <= n + head")
    assert "does not declare how many `heads`" in message(alone, "degree <= 1")
    assert "does not declare how many `heads`" in message(alone, "causal")
    # what fails for the first fails, and what follows for any of them follows
    assert "degree is 1, must be < 1" in message(alone, "degree < 1")
    assert verdict(alone, "window(radius = head) subset full").status == "proven"
    assert verdict(alone, "symmetric").status == "proven"


def test_a_bound_of_nothing_is_no_order() -> None:
    assert "the bound grow in head 0" in message("heads 2 attend self", "order <= n ** head")
    assert verdict("heads 2 attend self", "order <= n * (head + 1)").status == "proven"
    assert verdict("heads 2 attend self", "order <= n * head").status == "refuted"


def test_many_layers_and_heads_are_bounded() -> None:
    body = "layers 4096 heads 64 attend self"
    assert verdict(body, "degree <= head + 1 at n = 64").status == "checked"
    assert "16,384 layers and heads" in message(body, "degree <= head + layer + 1 at n = 64")
