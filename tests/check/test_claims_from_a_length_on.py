"""Claims `for n >= N`: where they are checked, what is proven, and when one is offered."""

from __future__ import annotations

import pytest

from attnspec.check.verdicts import Verdict
from attnspec.cli.check_command import Checked
from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import SpecError


def spec_of(body: str) -> Spec:
    return parse(f"attention a(r = 3) {{ {body} }}")


def verdict(body: str) -> Verdict:
    (found,) = spec_of(body).verdicts
    return found


@pytest.mark.parametrize(
    ("bound", "lengths"),
    [
        ("1", (1, 2, 64, 257, 1024)),
        ("2", (2, 3, 64, 257, 1024)),
        ("2 * r + 1", (7, 8, 64, 257, 1024)),
        ("63", (63, 64, 257, 1024)),
        ("64", (64, 65, 257, 1024)),
        ("1024", (1024, 1025)),
        ("2000", (2000, 2001)),
    ],
)
def test_where_a_claim_is_checked(bound: str, lengths: tuple[int, ...]) -> None:
    found = verdict(f"attend window(radius = r) require degree <= 2 * r + 1 for n >= {bound}")
    assert (found.status, found.lengths) == ("checked", lengths)
    assert found.to_dict()["since"] == found.claim.since == lengths[0]


def test_what_holds_from_a_length_on() -> None:
    found = verdict("attend window(radius = r) require degree == 2 * r + 1 for n >= 2 * r + 1")
    assert found.status == "checked"
    early = verdict("attend window(radius = r) require degree == 2 * r + 1 for n >= 2 * r")
    assert (early.status, early.failed_at) == ("refuted", 6)
    late = verdict("attend window(radius = r) require edges <= 400 for n >= 50")
    assert (late.status, late.failed_at) == ("refuted", 64)


def test_what_is_proven_for_every_n_is_proven_from_there() -> None:
    found = verdict("causal attend window(before = r, after = 0) require causal for n >= 9")
    assert (found.status, found.claim.since) == ("proven", 9)
    same = "attend full require window(radius = r) subset window(radius = 9) for n >= 9"
    assert verdict(same).status == "proven"


def test_sizes_without_a_value_below_do_not_matter() -> None:
    sized = "attend block(size = n // 8) require degree <= n for n >= 8"
    assert verdict(sized).status == "checked"
    found = verdict("attend block(size = n // 8) require degree <= n")
    assert found.status == "unchecked"


def test_a_grid_has_one_length() -> None:
    body = "sequence grid(4, 4) attend full require degree == 16 for n >= %d"
    assert verdict(body % 16).lengths == (16,)
    assert verdict(body % 17).status == "unchecked"


def test_claims_about_inputs_are_doubted_from_there() -> None:
    found = verdict("input d: ids attend same(d) require causal for n >= 100")
    assert (found.status, found.failed_at) == ("refuted", 100)


def test_equal_programs_have_equal_claims() -> None:
    one, other = (spec_of(f"attend full require degree <= n for n >= {n}") for n in (4, 5))
    assert one != other
    assert one == parse(one.source)
    assert "require degree <= n for n >= 4" in one.source


@pytest.mark.parametrize(
    ("clause", "message"),
    [
        ("for n >= n", "it reads `n`"),
        ("for n >= 0", "from 1 to 2**31 - 2, got 0"),
        ("for n >= 2.5", "must be an integer, got 2.5"),
        ("for n >= 2147483647", "got 2147483647"),
        ("for n > 4", "write `for n >= 5`"),
        ("for n < 4", "or `at n = …` for some lengths alone"),
        ("for every n", "`for n >= …`; there are no loops"),
        ("at n = 4 for n >= 4", "one of `at n = …` and `for n >= …`"),
        ("for n >= 4 at n = 4", "one of `at n = …` and `for n >= …`"),
    ],
)
def test_faults(clause: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        spec_of(f"attend full require degree <= n {clause}")
    assert message in str(caught.value)


def test_layer_and_head_are_no_lengths() -> None:
    with pytest.raises(SpecError, match="it reads `head` and `layer`"):
        spec_of("heads 2 layers 2 attend full require degree <= n for n >= head + layer + 1")


# --- the way out ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "since"),
    [
        ("degree == 2 * r + 1", 7),
        ("degree >= 5", 5),
        ("edges >= 100", 16),
        ("density < 0.5", 13),
    ],
)
def test_a_count_that_fails_for_short_sequences_is_offered_its_length(
    claim: str, since: int
) -> None:
    (found,) = spec_of(f"attend window(radius = r) require {claim}").check()
    assert found.help is not None
    assert f"`for n >= {since}`" in found.help
    assert (
        verdict(f"attend window(radius = r) require {claim} for n >= {since}").status == "checked"
    )
    if since > 1:
        before = f"attend window(radius = r) require {claim} for n >= {since - 1}"
        assert verdict(before).status == "refuted"


@pytest.mark.parametrize("what", ["degree", "edges"])
@pytest.mark.parametrize("graph", ["window(radius = 3)", "causal", "block(size = 4)"])
def test_the_length_that_is_offered_is_the_first_from_which_on_it_holds(
    what: str, graph: str
) -> None:
    masks = [parse(f"attention a {{ attend {graph} }}").mask(n) for n in range(1, 40)]
    values = [mask.sum() if what == "edges" else mask.sum(1).max() for mask in masks]
    for least in range(1, 9):
        fails = [n for n, value in enumerate(values, 1) if value < least]
        found = parse(f"attention a {{ attend {graph} require {what} >= {least} }}").check()
        if not fails:
            assert not found
        elif fails[-1] == len(values):
            assert found[0].help is None
        else:
            assert f"from n = {fails[-1] + 1} on it holds" in str(found[0].help)


@pytest.mark.parametrize("claim", ["degree <= 5", "degree == 5", "edges <= 10"])
def test_what_fails_for_long_ones_is_not(claim: str) -> None:
    (found,) = spec_of(f"attend window(radius = r) require {claim}").check()
    assert found.help is None


def test_the_summary_says_from_where() -> None:
    spec = spec_of(
        "causal attend window(before = r, after = 0)"
        " require causal for n >= 9 require degree == r + 1 for n >= r + 1"
    )
    said = Checked("a.attn", ("a",), spec.verdicts, tuple(spec.check())).summary()
    assert "1 for every n >= 9" in said
    assert "1 at n = 4, 5, 64, 257, 1,024" in said
