"""What steps are chosen from: terms of a relation, orders, sizes of tiles; and that the cheapest of
those that are offered is taken."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import numpy as np
import pytest
from attention_checks import spec_of
from random_terms import term
from relation_checks import definition

from attnspec.graphs.bind import Situation, bind
from attnspec.graphs.patterns import BY_NAME
from attnspec.graphs.relation import Relation
from attnspec.layout import orders, steps, tiling
from attnspec.layout.orders import NATURAL, Boxed, Listed, orders_of, terms_of, without
from attnspec.layout.steps import BANDS, Banded, about, amounts_of, fixed, members_of, seconds_of
from attnspec.layout.tiling import TooFine
from attnspec.limits import LIMITS


def relations(n: int, number: int) -> list[Relation]:
    draw = random.Random(n)
    at = Situation(n=n, patterns=BY_NAME)
    return [bind(term(draw), at) for _ in range(number)]


@pytest.mark.limits("", "tiny")
def test_terms_are_the_relation_together() -> None:
    n = 11
    for relation in relations(n, 80):
        terms = terms_of(relation)
        assert 1 <= len(terms) <= LIMITS.parts
        held = np.any([definition(each, n) for each in terms], axis=0)
        assert (held == definition(relation, n)).all(), relation
        # what is left of each is the relation, too, each pair once
        left = [definition(without(each, terms[:at]), n) for at, each in enumerate(terms)]
        assert (np.sum(left, axis=0) == held).all()


def test_unions_inside_intersections_are_terms() -> None:
    relation = spec_of(
        "attend (window(radius = 2) | residue(step = 3)) & (causal | columns(first(2)))"
    ).relation(20)
    assert len(terms_of(relation)) == 4
    assert len(terms_of(spec_of("attend strided(stride = 5)").relation(20))) == 2


def test_a_common_multiple_of_steps_is_an_order() -> None:
    found = orders_of(spec_of("attend residue(step = 4) & residue(step = 6)").relation(100), 100)
    assert found[0] == NATURAL
    assert found[1] == orders.Order(12, 12)
    assert {orders.Order(4, 4), orders.Order(6, 6)} <= set(found)
    assert len(found) <= LIMITS.orders


def test_boxes_hold_so_many_cells_and_are_as_even_as_may_be() -> None:
    for extents in ((7,), (64,), (8, 8), (3, 40), (1, 5), (5, 4, 9), (2, 2, 2)):
        for cells in (1, 2, 4, 8, 16, 64, 1024):
            box = orders._box(extents, cells)
            # doubled sides, none further than it takes to hold what there is
            assert all(side & (side - 1) == 0 for side in box)
            sides = [*zip(box, extents, strict=True)]
            assert all(side == 1 or side // 2 < extent for side, extent in sides)
            full = all(side >= extent for side, extent in sides)
            assert prod(box) == cells or (full and prod(box) < cells)
            free = [side for side, extent in sides if side < extent]
            assert all(max(box) <= 2 * side for side in free)
            # those behind are the larger ones
            assert free == sorted(free)


def test_tiles_are_of_about_a_size() -> None:
    for length, side, target in product((1, 7, 64, 100, 129), (1, 3, 16), (1, 8, 32)):
        members = members_of(length, side)
        assert members == -(-length // side)
        assert fixed(length, side, target) == target
        size = about(length, side, target)
        count = max(1, round(members / target))
        # as many tiles as that, and none has a place more than it must
        assert size * count >= members > (size - 1) * count
    listed = Listed((2, 5, 9))
    assert (members_of(40, listed), members_of(40, Listed(()))) == (3, 1)
    assert (about(40, listed, 2), about(40, listed, 100)) == (2, 3)
    boxed = Boxed((8, 8), 0, (2, 4))
    assert members_of(64, boxed) == 64
    assert about(64, boxed, 32) == boxed.size == 8
    assert [fixed(64, boxed, target) for target in (1, 8, 15, 16, 70)] == [8, 8, 8, 16, 64]


@pytest.mark.parametrize("fine", [0, 24, 48, 200, 300, 4096])
@pytest.mark.parametrize("body", ["strided(stride = 8) & causal", "residue(step = 16)"])
def test_the_cheapest_of_what_is_offered_is_taken(
    body: str, fine: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles below a size are too many here; larger ones are looked at where no others will do."""
    relation = spec_of(f"attend {body}").relation(500)
    given = orders_of(relation, 500)
    seen: list[Banded] = []
    offered = steps.banded

    def banded(*args: object) -> Banded:
        found = offered(*args)  # type: ignore[arg-type]
        if found.sizes[0] < fine:
            raise TooFine("too many")
        seen.append(found)
        return found

    monkeypatch.setattr(steps, "banded", banded)
    found = steps._best(relation, 500, 500, given, BANDS)
    if not seen:
        assert found.endless
        assert found.seconds == float("inf")
        return
    assert found.seconds == min(each.seconds for each in seen)
    for order in given:
        mine = [each.sizes for each in seen if each.step.order == order]
        usual, large = (
            [offered(relation, 500, 500, order, target).sizes for target in targets]
            for targets in (BANDS.targets, BANDS.large)
        )
        wanted = [sizes for sizes in usual if sizes[0] >= fine]
        if usual[-1][0] < fine:
            wanted += [sizes for sizes in large if sizes[0] >= fine][:1]
        assert mine == wanted


def test_what_steps_take_is_added_up() -> None:
    relation = spec_of("attend window(radius = 20) | residue(step = 16)").relation(1024)
    bands = steps.chosen_at(relation, 1024, 1024)
    total = amounts_of(bands, 1024)
    names = {name for band in bands for name in band.amounts}
    for name in names:
        assert total[name] == sum(band.amounts.get(name, 0.0) for band in bands)
    assert total["bands_merge"] == 1024 * (len(bands) - 1)
    assert seconds_of(bands, 1024) >= max(band.seconds for band in bands)
    twice = amounts_of((*bands, *bands), 1024)
    assert all(twice[name] == 2 * total[name] for name in names)
    assert twice["bands_merge"] == 1024 * (2 * len(bands) - 1)


def test_one_of_each_of_equal_ranges_is_looked_at() -> None:
    for count, most in ((0, 4), (4, 4), (5, 4), (100, 7), (64, 16)):
        chosen, weight = tiling._thinned(count, most)
        if count <= most:
            assert (chosen.tolist(), weight) == ([*range(count)], 1.0)
            continue
        assert weight == count / most
        edges = np.arange(most + 1) * count / most
        assert ((np.floor(edges[:-1]) <= chosen) & (chosen < edges[1:])).all()


def test_orders_are_of_listed_tokens_and_say_their_names() -> None:
    def names(body: str, n: int = 40) -> list[str]:
        return [str(order) for order in orders_of(spec_of(f"attend {body}").relation(n), n)]

    assert names("window(radius = 3)") == ["natural order"]
    assert names("residue(step = 5)")[1:] == ["order of residues mod 5"]
    assert names("rows(first(3))")[1:] == ["order of 3 listed queries"]
    assert names("columns(every(4))")[1:] == ["order of 10 listed keys"]
    both = names("rows(first(3)) & columns(every(4))")
    assert {"order of 3 listed queries", "order of 10 listed keys"} <= set(both)
    assert str(orders.Order(1, 4)) == "order of keys mod 4"
    assert str(orders.Order(4, 1)) == "order of queries mod 4"
    grid = spec_of("sequence grid(8, 16) attend neighborhood(3, 3)").relation(128)
    assert [str(order) for order in orders_of(grid, 128)] == [
        "natural order",
        "order of queries in boxes of 4 x 8, keys in boxes of 2 x 2",
        "order of queries in boxes of 8 x 8, keys in boxes of 2 x 2",
    ]
