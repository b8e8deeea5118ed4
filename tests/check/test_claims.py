"""Claims beside what counts on masks say; verdicts as plain data; words of the language."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest
from population import spec_of
from sweeps import few

import attnspec
from attnspec.spec import parse


def verdict(body: str) -> Any:
    (found,) = parse(f"attention a(r = 3) {{ {body} }}").verdicts
    return found


PARTS = (
    "self",
    "full",
    "window(radius = 1)",
    "residue(step = 2)",
    "global(first(1)) | self",
    "block(size = 3)",
    "summary(stride = 3, cells = 1) | self",
)
DEPTHS = ("depth <= 2", "depth <= n - 1")


@pytest.mark.parametrize(("causal", "step"), few([("", 4), ("", 1), ("causal ", 1)], 3))
def test_depths_of_two_layers_are_proven_soundly(causal: str, step: int) -> None:
    """The last layer stands above itself, and no other is met again."""
    proven = 0
    for first, second in list(product(PARTS, repeat=2))[::step]:
        claims = " ".join(f"require {claim}" for claim in DEPTHS)
        body = f"{causal}layers 2 attend {first} layer 1 {{ attend {second} }}"
        spec = spec_of(f"{body} {claims}")
        depths = {n: spec.analyse(n).depth for n in (2, 11)}
        for most, found in zip((2, None), spec.verdicts, strict=True):
            if found.status == "proven":
                proven += 1
                for n, depth in depths.items():
                    bound = n - 1 if most is None else most
                    assert depth is not None, (body, n)
                    assert depth <= bound, (body, n)
    assert proven * step > 12


@pytest.mark.parametrize(
    "body",
    [
        "attend window(radius = 1)\nrequire diameter <= 4",
        "heads 2 attend block(size = 8) head 1 { attend self }\nrequire path_length <= 2 at n = 64",
        "causal attend block(size = 32)\nrequire depth <= 16 at n = 512",
        "causal attend window(before = 31, after = 0)\nrequire depth <= 3 at n = 1000",
    ],
)
def test_hints_can_be_pasted_and_hold(body: str) -> None:
    text = f"attention a {{\n{body}\n}}"
    (refuted,) = [d for d in parse(text).check() if d.code == "A606"]
    found = re.search(r"`(\| [^`]*)` after", refuted.help or "")
    assert found is not None, refuted.help
    attend = re.compile(r"attend [^\n{]*?(?= head|\n)")
    mended = parse(attend.sub(lambda old: f"{old[0]} {found[1]}", text, count=1))
    assert [d for d in mended.check() if d.severity == "error"] == []


@pytest.mark.parametrize("what", ["degree", "edges"])
@pytest.mark.parametrize("graph", ["window(radius = 3)", "causal", "block(size = 4)"])
def test_the_length_that_is_offered_is_the_first_from_which_on_it_holds(
    what: str, graph: str
) -> None:
    masks = [spec_of(f"attend {graph}").mask(n) for n in range(1, 40)]
    values = [mask.sum() if what == "edges" else mask.sum(1).max() for mask in masks]
    for least in range(1, 9):
        fails = [n for n, value in enumerate(values, 1) if value < least]
        found = spec_of(f"attend {graph} require {what} >= {least}").check()
        if not fails:
            assert not found
        elif fails[-1] == len(values):
            assert found[0].help is None
        else:
            assert f"`for n >= {fails[-1] + 1}`" in str(found[0].help)


@pytest.mark.parametrize("figure", ["diameter", "depth"])
@pytest.mark.parametrize("body", ["window(radius = 2)", "window(radius = 1) | residue(step = 5)"])
def test_an_example_is_as_far_as_the_figure_says(figure: str, body: str) -> None:
    spec = spec_of(f"attend {body} require {figure} <= 1 at n = 40")
    (message,) = (d.message for d in spec.check() if d.code == "A606")
    query, key = map(int, re.findall(r"query (\d+) takes .* to read key (\d+)", message)[0])
    assert spec.analyse(40).hops(query)[key] == getattr(spec.analyse(40), figure)


@pytest.mark.parametrize(
    ("bound", "lengths"),
    [
        ("1", (1, 2, 64, 257, 1024)),
        ("2 * r + 1", (7, 8, 64, 257, 1024)),
        ("64", (64, 65, 257, 1024)),
        ("1024", (1024, 1025)),
        ("2000", (2000, 2001)),
    ],
)
def test_where_a_claim_is_checked(bound: str, lengths: tuple[int, ...]) -> None:
    found = verdict(f"attend window(radius = r) require degree <= 2 * r + 1 for n >= {bound}")
    assert (found.status, found.lengths) == ("checked", lengths)
    assert found.to_dict()["since"] == found.claim.since == lengths[0]


@pytest.mark.parametrize(
    ("body", "status", "lengths", "failed_at"),
    [
        ("attend full require depth <= 1", "proven", (), None),
        ("attend where(not q != k) require rows_nonempty", "proven", (), None),
        ("sequence grid(isqrt(n), isqrt(n)) attend axial require symmetric", "proven", (), None),
        ("attend window(radius = 3) require depth <= 400", "checked", (1, 2, 64, 257, 1024), None),
        ("attend window(radius = 3) require depth <= 40", "refuted", None, 257),
        ("attend window(radius = r) require degree == 7 for n >= 6", "refuted", None, 6),
        ("attend window(radius = r) require edges <= 400 for n >= 50", "refuted", None, 64),
        ("input d: ids attend same(d) require causal for n >= 100", "refuted", None, 100),
        (
            "sequence grid(4, 4) attend full require degree == 16 for n >= 16",
            "checked",
            (16,),
            None,
        ),
    ],
)
def test_verdicts_name_their_lengths(
    body: str, status: str, lengths: tuple[int, ...] | None, failed_at: int | None
) -> None:
    found = verdict(body)
    assert (found.status, found.failed_at) == (status, failed_at)
    assert lengths in (None, found.lengths)


def test_claims_of_other_lengths_are_other_specs() -> None:
    one, other = (spec_of(f"attend full require degree <= n for n >= {n}") for n in (4, 5))
    assert one != other
    assert one == parse(one.source)
    assert "require degree <= n for n >= 4" in one.source


@pytest.mark.parametrize("name", sorted(attnspec._GONE))
def test_names_that_were_public_are_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"'{name}': .*`"):
        getattr(attnspec, name)
