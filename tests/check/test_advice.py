"""Advice: every repair that is suggested parses, holds, costs what it says, and stays causal."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import numpy as np
import pytest
from random_specs import spec_text
from sweeps import thinned

import attnspec
from attnspec.analysis.counting.degrees import total_edges
from attnspec.analysis.reach import bitsets, reach
from attnspec.analysis.reach.chain import layers_of, union_of
from attnspec.analysis.reach.spread import spread
from attnspec.check import repairs
from attnspec.check.budget import joins, mean_within, price_of_layer
from attnspec.check.counterexamples import COMPARE
from attnspec.check.repairs import LONGEST, Advice, words
from attnspec.spec import Spec, advise, load, parse


def spec_of(body: str) -> Spec:
    return parse(f"attention a {{\n{body}\n}}")


def advice(body: str) -> Advice:
    (found,) = advise(spec_of(body))
    return found


def kinds(body: str) -> list[str]:
    return [repair.kind for repair in advice(body).repairs]


def pasted(text: str, line: str, instead: bool) -> str:
    """What a user does: paste the line over the one `attend` of a text, or below it."""
    (statement,) = re.findall(r"^attend .*$", text, re.MULTILINE)
    return text.replace(statement, line if instead else f"{statement}\n{line}")


CASES = (
    "causal\nattend block(size = 8)\nrequire depth <= 7 at n = 64",
    "causal\nheads 4\nattend block(size = 8)\nrequire reach(layers = 3) at n = 64",
    "attend block(size = 8)\nrequire diameter <= 3 at n = 64, 60",
    "attend window(radius = 1)\nrequire diameter <= 4",
    "attend window(before = 2, after = 1)\nrequire depth < 9 at n = 50",
    "causal\nattend window(before = 3, after = 0)\nrequire reach(layers = 4) at n = 60",
    "causal\nattend dilated(radius = 9, step = 3)\nrequire depth <= 9 at n = 64",
    "layers 3\nheads 2\nattend residue(step = 4)\nrequire depth <= 3 at n = 64",
    "attend window(radius = isqrt(n))\nrequire path_length <= 2 at n = 64",
    "attend random(keys = 2, seed = 3) | self\nrequire depth <= 3 at n = 40",
    "attend columns(last(1)) | self\nrequire diameter <= 5 at n = 33",
    "causal\nattend self\nrequire depth <= 1",
    "attend self - full\nrequire reach(layers = 2) at n = 9, 16",
)


@pytest.mark.parametrize("body", CASES)
def test_each_repair_can_be_pasted_and_holds(body: str) -> None:
    text = f"attention a {{\n{body}\n}}"
    spec = parse(text)
    (found,) = advise(spec)
    assert found.repairs
    for repair in found.repairs:
        mended = parse(pasted(text, repair.line, repair.instead))
        assert mended == parse(repair.source)
        assert [d for d in mended.check() if d.severity == "error"] == []
        claim = mended.program.claims[0]
        for n in claim.at or (1, 2, 64, 257, 1024):
            assert joined(mended, n, claim.kind, limit(text, n)), (repair, n)
        more = total_edges(mended.stack(), repair.n) - total_edges(spec.stack(), repair.n)
        assert repair.extra_edges == more
        assert mended.program.causal >= spec.program.causal
    costs = [repair.extra_edges for repair in found.repairs]
    assert costs == sorted(costs)


def limit(text: str, n: int) -> float:
    compare, bound = re.search(r"(<=|<|layers =) (\d+)", text).groups()  # type: ignore[union-attr]
    return int(bound) - (compare == "<")


def joined(spec: Spec, n: int, kind: str, most: float) -> bool:
    """Reach by products of boolean matrices."""
    heads = range(spec.heads or 1)
    layers = [
        np.logical_or.reduce([spec.mask(n, layer, head) for head in heads])
        for layer in range(spec.layers)
    ]
    allowed = np.tril(np.ones((n, n), bool)) if spec.program.causal else np.ones((n, n), bool)
    if kind in ("diameter", "path_length"):
        layers = [np.logical_or.reduce(layers)]
    read = np.eye(n, dtype=bool)
    missing = []
    for layer in range(n + len(layers)):
        missing.append(int((allowed & ~read).sum()))
        if not missing[-1] or (kind != "path_length" and layer == most):
            break
        graph = layers[min(layer, len(layers) - 1)] | np.eye(n, dtype=bool)
        read = (graph.astype(np.float32) @ read.astype(np.float32)) > 0
    if kind == "path_length":
        return missing[-1] == 0 and sum(missing) / (allowed.sum() - n) <= most
    return missing[-1] == 0


def test_the_smallest_of_each_kind_is_found() -> None:
    (window, *_) = [
        repair
        for repair in advice("attend window(radius = 1)\nrequire diameter <= 4 at n = 64").repairs
        if repair.kind == "a wider window"
    ]
    # 63 positions in 4 steps
    assert window.line == "attend window(radius = 16)"
    assert reach.diameter(spec_of("attend window(radius = 15)").stack(), 64).value == 5


@pytest.mark.parametrize(
    "body",
    [
        "attend residue(step = 4)\nrequire depth <= 5",
        "causal\nattend self\nrequire depth <= 19",
        "causal\nattend self\nrequire depth <= 6",
        "attend window(radius = 2) | residue(step = 6)\nrequire diameter <= 1",
        "attend columns(first(3))\nrequire diameter <= 3",
        "attend window(radius = 0)\nrequire depth <= 19",
        "causal\nattend window(before = 1, after = 0)\nrequire depth <= 10",
    ],
)
def test_a_window_one_narrower_is_not_enough(body: str) -> None:
    n = 20
    text = f"attention a {{\n{body} at n = {n}\n}}"
    (window,) = [
        repair for repair in advise(parse(text))[0].repairs if repair.kind == "a wider window"
    ]
    size = int(re.findall(r"(?:radius|before) = (\d+)", window.line)[-1])
    kind, most = parse(text).program.claims[0].kind, limit(text, n)
    for one in range(size + 1):
        narrower = re.sub(rf"(radius|before) = {size}\b", rf"\1 = {one}", window.line)
        spec = parse(pasted(text, narrower, window.instead))
        assert joined(spec, n, kind, most) == (one == size), (one, window.line)


def test_the_cheapest_comes_first() -> None:
    found = advice("attend window(radius = 3)\nrequire diameter <= 2 at n = 1024")
    assert [repair.kind for repair in found.repairs] == [
        "one global token",
        "a stride",
        "a wider window",
    ]
    assert found.repairs[0].line == "attend window(radius = 3) | global(first(1))"
    assert found.repairs[0].extra_edges == 2040


def test_shifted_chunks_join_chunks() -> None:
    body = "causal\nattend block(size = 16)\nrequire depth <= 15 at n = 128"
    assert "shifted chunks" in kinds(body)
    (repair,) = [one for one in advice(body).repairs if one.kind == "shifted chunks"]
    assert repair.line == "attend block(size = 16) | shift(block(size = 16), by = 8)"


def test_one_head_is_enough() -> None:
    found = advice("heads 8\nattend block(size = 8)\nrequire depth <= 2 at n = 64").repairs[0]
    assert found.line == "head 7 { attend block(size = 8) | global(first(1)) }"
    assert not found.instead
    assert found.extra_edges == 2 * (64 - 8)
    # also inside a scope
    own = "heads 3\nhead 0, 1 { attend block(size = 8) }\nhead 2 { attend self }"
    (other,) = advise(spec_of(f"{own}\nrequire depth <= 2 at n = 64"))
    assert other.repairs[0].line == "head 1 { attend block(size = 8) | global(first(1)) }"
    assert other.repairs[0].extra_edges == 2 * (64 - 8)
    # a statement of one head is changed itself
    apart = "heads 2\nattend block(size = 8)\nhead 1 { attend self }"
    (third,) = advise(spec_of(f"{apart}\nrequire depth <= 2 at n = 64"))
    assert third.repairs[0].line == "attend block(size = 8) | global(first(1))"
    assert third.repairs[0].instead


def test_under_causal_no_global_token_helps() -> None:
    found = advice("causal\nattend block(size = 8)\nrequire reach(layers = 2) at n = 64")
    assert [repair.kind for repair in found.repairs] == ["a wider window"]
    assert "one global token" in found.tried
    assert all(parse(repair.source).program.causal for repair in found.repairs)


def test_what_looks_back_alone_stays_so() -> None:
    window = "attend window(before = 7, after = 0)\nrequire causal\nrequire depth <= {} at n = 64"
    found = advice(window.format(9))
    assert [(repair.kind, repair.line) for repair in found.repairs] == [
        ("declaring it causal", "causal")
    ]
    none = spec_of(window.format(3))
    assert advise(none)[0].repairs == ()
    (message,) = [d for d in none.check() if d.code == "A606"]
    assert message.notes == ("none of these makes it hold: declaring it causal",)
    assert message.help is None


def test_causal_is_said_of_the_whole_attention() -> None:
    body = (
        "layers 2\nlayer 0 { attend near(4) }\n"
        "layer 1 { attend near(2) }\nrequire depth <= 40 at n = 64"
    )
    graph = "graph near(r) = window(before = r, after = 0)\n"
    spec = parse(f"{graph}attention a(h = 2) {{\n{body}\n}}")
    (repair,) = advise(spec)[0].repairs
    # inside a scope it would be refused
    causal = f"causal\n{body}"
    assert parse(repair.source) == parse(f"{graph}attention a(h = 2) {{\n{causal}\n}}")
    (message,) = [d for d in spec.check() if d.code == "A606"]
    assert message.help == (
        "it holds with `causal` at the head of the attention (no more pairs at n = 64)"
    )


def test_other_claims_that_break_are_named() -> None:
    body = "attend window(radius = 2)\nrequire depth <= 2 at n = 64\nrequire degree <= 5 at n = 64"
    first = advice(body).repairs[0]
    assert first.breaks == ("degree <= 5",)
    (message,) = [d for d in spec_of(body).check() if d.code == "A606"]
    assert message.help is not None
    assert message.help.endswith("but then `degree <= 5` does not hold")
    # what breaks nothing comes first, though it may cost more
    kept = body.replace("degree <= 5 at n = 64", "degree <= 60 at n = 64")
    assert advice(kept).repairs[0].breaks == ()


def test_the_message_holds_the_line() -> None:
    spec = spec_of("causal\nattend block(size = 32)\nrequire depth <= 16 at n = 512")
    (message,) = spec.check()
    assert message.help == (
        "it holds with `attend block(size = 32) | window(before = 32, after = 0)` in place of the"
        " `attend` of line 3 (7,920 more pairs at n = 512)"
    )


def test_parameters_and_names_stay(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "local.attn").write_text("graph near(r) = window(radius = r)")
    path = tmp_path / "a.attn"
    path.write_text(
        'from "local.attn" import near\nattention a(r = 2) {\n    let s = r  # twice\n'
        "    attend near(s) # the\n        | self\n    require depth <= 2 at n = 64\n}"
    )
    (found,) = advise(load(path, r=3))
    line = found.repairs[0].line
    assert line == "attend near(s) | self | global(first(1))"
    text = path.read_text()
    path.write_text(text.replace("attend near(s) # the\n        | self", line))
    assert [d for d in load(path, r=3).check() if d.severity == "error"] == []


@pytest.mark.parametrize(
    "body",
    [
        "attend full\nrequire depth >= 2",
        "attend full\nrequire depth == 2",
        "attend full\nrequire edges <= n",
        "attend window(radius = 1)\nrequire causal",
        "attend full\nrequire depth <= 2",
    ],
)
def test_what_more_pairs_cannot_mend_gets_no_advice(body: str) -> None:
    assert advise(spec_of(body)) == ()


def test_long_sequences_get_none_and_are_told() -> None:
    spec = spec_of(f"attend window(radius = 1)\nrequire depth <= 3 at n = {LONGEST + 1}")
    assert advise(spec)[0].repairs == ()
    (message,) = spec.check()
    assert message.notes == ("repairs are looked for up to n = 4,096",)


def test_where_nothing_works_that_is_said() -> None:
    spec = spec_of("attend window(radius = 1)\nrequire depth <= 0 at n = 5")
    (message,) = spec.check()
    assert message.notes == (
        "none of these makes it hold: one global token, a wider window, a stride, an expander",
    )


def test_a_window_that_differs_from_layer_to_layer_is_not_narrowed() -> None:
    body = "layers 6\nattend window(radius = 2 ** layer)\nrequire depth <= 3 at n = 200"
    (wider,) = [one for one in advice(body).repairs if one.kind == "a wider window"]
    assert wider.line == "attend window(radius = 2 ** layer) | window(radius = 67)"
    assert wider.extra_edges > 0


def test_what_takes_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    body = "attend window(radius = 1) | residue(step = 50)\nrequire depth <= 2 at n = 200"
    monkeypatch.setattr("attnspec.check.repairs.BUDGET", 0)
    spec = spec_of(body)
    (found,) = advise(spec)
    assert (found.repairs, found.tried, found.complete) == ((), (), False)
    (message,) = spec.check()
    assert message.notes == ("repairs would take longer to look for than is spent on it",)
    # what was found before is kept, though it may not be the smallest
    monkeypatch.setattr("attnspec.check.repairs.BUDGET", 1 << 22)
    some = advice(body)
    assert not some.complete
    assert some.repairs[0].kind == "one global token"


@pytest.mark.parametrize("seed", range(12))
def test_a_mean_is_compared_as_soon_as_it_is_decided(seed: int) -> None:
    chain = union_of(parse(spec_text(seed)).stack(), 37)
    whole = spread(chain)
    mean = sum(whole.missing) / max(1, whole.pairs - whole.own)
    for value in (0.5, 1.0, mean - 0.01, mean, mean + 0.01, 50.0):
        for compare in ("<", "<="):
            expected = whole.layers is not None and COMPARE[compare](mean, value)
            holds, cost = mean_within(chain, compare, value, 10_000, 1)
            assert holds == expected
            # no layers are paid for that nothing is looked at in: of those of each of a few trials,
            # each twice as long as the one before, the last ends where nothing more is joined
            assert cost <= 2 * len(whole.missing) + math.ceil(value) + 9
    # what is not decided counts as not holding, and takes all that there was
    assert mean_within(chain, "<=", 50.0, 3, 7) == (False, 21)


@pytest.mark.parametrize("claim", ["depth <= 9", "diameter <= 9", "path_length <= 9"])
def test_what_nothing_is_spent_on_does_not_hold(claim: str) -> None:
    spec = spec_of(f"attend full\nrequire {claim} at n = 20")
    (asked,) = spec.program.claims
    assert joins(spec.stack(), asked, 20, 0) == (False, 0)
    assert joins(spec.stack(), asked, 20, 1 << 20)[0]


def test_all_that_a_trial_takes_is_spent() -> None:
    spec = spec_of("layers 3\nattend window(radius = 2)\nrequire depth <= 9 at n = 64")
    (verdict,) = spec.verdicts
    work = repairs.Search(spec.elaborated, 0, verdict, spec.verdicts)
    for body in ("attend window(radius = 2)", "attend window(radius = 4) | global(first(1))"):
        for n in (9, 64):
            tried = spec_of(f"layers 3\n{body}\nrequire depth <= 9 at n = 64")
            stack, before = tried.stack(), work.spent
            holds, cost = joins(stack, stack.program.claims[0], n, repairs.BUDGET)
            assert cost > 0
            assert work._holds(tried.elaborated, n) == holds
            ready = repairs.GRAPH_COST * n * len(stack.bound(n).found)
            assert work.spent - before == ready + cost


def test_chunks_of_a_size_that_is_no_number_are_not_shifted() -> None:
    found = advice("causal\nattend block(size = isqrt(n))\nrequire depth <= 7 at n = 64")
    assert found.repairs
    assert "shifted chunks" not in found.tried
    numbered = advice("causal\nattend block(size = 8)\nrequire depth <= 7 at n = 64")
    assert "shifted chunks" in numbered.tried


def test_what_is_spent_is_not_exceeded() -> None:
    spec = spec_of("attend window(radius = 1)\nrequire depth <= 39 at n = 40")
    (asked,) = spec.program.claims
    layer = price_of_layer(layers_of(spec.stack(), 40))
    # 39 layers join all: after three it is not known, and counts as not holding
    assert joins(spec.stack(), asked, 40, 3 * layer + 1) == (False, 3 * layer + 1)
    assert joins(spec.stack(), asked, 40, 100 * layer) == (True, 40 * layer)


def test_passes_are_priced_by_what_they_read() -> None:
    n = 40
    prices = [
        bitsets.pairs_per_pass(union_of(parse(f"attention a {{ {body} }}").stack(), n).graph(0))
        for body in (
            "attend window(radius = 2) | residue(step = 7)",
            "heads 3 attend window(radius = 2) | residue(step = 7 + head)",
            "attend random(keys = 8)",
        )
    ]
    assert prices == [2 * n * n, 4 * n * n, n * n + n * (8 * n // 2)]


def test_advice_from_python() -> None:
    spec = spec_of("attend block(size = 4)\nrequire depth <= 2 at n = 32")
    assert attnspec.advise(spec) == advise(spec)


@pytest.mark.parametrize("seed", thinned(range(8)))
def test_random_specs_are_mended(seed: int) -> None:
    draw = random.Random(seed)
    causal = draw.choice(("causal\n", ""))
    graph = draw.choice(
        (
            f"block(size = {draw.randint(3, 9)})",
            f"dilated(radius = {draw.randint(4, 12)}, step = {draw.randint(2, 4)})",
            f"random_blocks(size = 4, blocks = 1, seed = {seed}) | self",
            f"window(radius = {draw.randint(1, 3)}) - residue(step = 2) | self",
        )
    )
    n, most = draw.randint(30, 64), draw.randint(2, 5)
    text = f"attention a {{\n{causal}attend {graph}\nrequire depth <= {most} at n = {n}\n}}"
    for found in advise(parse(text)):
        assert found.repairs
        for repair in found.repairs:
            assert joined(parse(pasted(text, repair.line, repair.instead)), n, "depth", most)


def test_a_claim_may_speak_of_the_first_layer_and_head() -> None:
    body = "causal heads 2 attend window(before = 2, after = 0) require depth <= head + layer + 1"
    spec = attnspec.parse(f"attention a {{ {body} }}")
    (found,) = attnspec.advise(spec)
    assert "head + layer + 1" in found.claim


def test_a_repair_that_fits_the_lengths_looked_at_alone_says_so() -> None:
    body = "attend window(radius = 3)\nrequire diameter <= 2"
    found = advice(body)
    proven = {repair.kind: repair.for_every_n for repair in found.repairs}
    assert proven["one global token"]
    assert not proven["a wider window"]
    _, notes = words(found)
    assert next(note for note in notes if "window(radius = 512)" in note).endswith(
        "at n = 1,024, not proven beyond)"
    )
    # longer sequences show why
    (wider,) = [one for one in found.repairs if one.kind == "a wider window"]
    assert parse(wider.source).analyse(2048).diameter == 4
    # the same of some lengths alone says all there is to say
    assert all(one.for_every_n for one in advice(f"{body} at n = 1024").repairs)
    # what is true of every length comes first, even where it has more pairs
    order = [repair.for_every_n for repair in found.repairs]
    assert order == sorted(order, reverse=True)


@pytest.mark.parametrize("late", [0, 1])
def test_statements_are_looked_at_until_one_can_be_mended(
    monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    asked: list[object] = []

    class Noting(repairs.Search):
        def repairs(self, statement: Any) -> Any:
            asked.append(statement)
            return super().repairs(statement) if len(asked) > late else []

    monkeypatch.setattr(repairs, "Search", Noting)
    body = "heads 2\nattend window(radius = 1)\nhead 1 { attend window(radius = 2) }"
    found = advice(f"{body}\nrequire depth <= 3")
    assert len(asked) == late + 1
    assert found.repairs
