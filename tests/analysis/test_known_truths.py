"""What is known of attention patterns, and mistakes of the field, written as specs with claims."""

from __future__ import annotations

import math

import numpy as np
import pytest

from attnspec import Difference, diff, parse


def verdicts(body: str, *claims: str) -> list[str]:
    """What `check` says of claims: nothing where all hold."""
    required = " ".join(f"require {claim}" for claim in claims)
    found = parse(f"attention a {{ {body} {required} }}").check()
    return [d.message for d in found if d.code.startswith("A6")]


CHUNKS, WINDOW = "causal attend block(size = 32)", "causal attend window(before = 31, after = 0)"
HALVES = "heads 2 attend block(size = 32) head 1 { attend where((q + 16) // 32 == (k + 16) // 32) }"
DILATIONS = "heads 3 attend dilated(radius = 8 * 2 ** (head + 1), step = 2 ** (head + 1))"
STRIDED = "attend strided(stride = isqrt(n))"
TWO_HEADS = (
    "heads 2 attend window(before = isqrt(n), after = 0) head 1 { attend residue(step = isqrt(n)) }"
)
BLOCK_FIRST = (
    "causal layers 2 layer {} {{ attend block(size = 8) }}"
    " layer {} {{ attend summary(stride = 8, cells = 1) | self }}"
)
CELLS_AROUND = (
    "causal layers 3 attend summary(stride = 8, cells = 1) | self layer 1 {"
    " attend block(size = 8) }"
)
LAYERS = "causal layers 2 layer {} {{ attend window(before = isqrt(n), after = 0) }}"
LAYERS += " layer {} {{ attend residue(step = isqrt(n)) }}"
PAPER = "window(before = 16, after = 0) | residue(step = 16)"
CODE = "window(before = 15, after = 0) | residue(step = 16)"
LOCAL = "block(size = 16, before = 1, after = 1)"
DRAWN = "random_blocks(size = 16, blocks = 3, seed = 7)"
EVERYWHERE = "global(first(16) | last(16))"
LEAST = "edges >= n * 16 * 7 at n = 1024"


def box(height: int, width: int) -> str:
    return (
        f"where(abs(min(max(q.row, 1), {height} - 2) - k.row) <= 1"
        f" and abs(min(max(q.col, 1), {width} - 2) - k.col) <= 1)"
    )


GRID = "sequence grid(8, 4) attend"

HOLD = [
    (WINDOW, "depth == 17 at n = 512", "reach(layers = 17) at n = 512"),
    # a second head with chunks half a chunk further on joins them
    (f"causal {HALVES}", "reach(layers = 31) at n = 512"),
    # one head without gaps is enough
    (f"{DILATIONS} head 2 {{ attend window(radius = 1) }}", "depth < 99 at n = 64"),
    *(
        (body, f"diameter == 2 at n = {n}", f"depth == 2 at n = {n}")
        for n in (64, 100, 1000)
        for body in (STRIDED, f"causal {STRIDED}", f"causal {TWO_HEADS}")
    ),
    *(
        (f"attend global({tokens}) | {local}", "diameter <= 2 at n = 7, 64, 257, 10_000")
        for tokens in ("first(1)", "last(1)", "positions(5)", "every(100)")
        for local in ("self", "window(radius = 3)", "random(keys = 2)")
    ),
    ("causal attend global(every(8)) | window(radius = 7)", "diameter <= 2"),
    (BLOCK_FIRST.format(0, 1), "reach(layers = 2) at n = 64"),
    # the fixed pattern may begin with summaries if it ends with them
    (CELLS_AROUND, "reach(layers = 3) at n = 64"),
    (LAYERS.format(0, 1), "reach(layers = 2)"),
    (LAYERS.format(1, 0), "reach(layers = 2)"),
    # the paper's window has one key more, which the stride reads anyway
    ("causal attend self", f"{PAPER} == {CODE}", f"{PAPER} == {CODE} at n = 65_536"),
    ("causal attend block(size = 16, before = 3)", "causal"),
    (f"{GRID} neighborhood(3, 3)", f"{box(8, 4)} == neighborhood(3, 3)"),
    (f"{GRID} {box(8, 4)}", "depth < 99"),
    (f"attend {LOCAL} | {DRAWN}", "diameter <= 5 at n = 1024"),
    (f"attend {LOCAL} | {EVERYWHERE} | {DRAWN}", LEAST),
    # libraries whose masks say what is hidden write a chunked causal mask with "or"
    (
        "attend ~(~causal | ~block(size = 16))",
        "~(~causal | ~block(size = 16)) == causal & block(size = 16)",
        "causal",
    ),
    ("causal attend where(k > q - 8)", "window(before = 7, after = 0) == where(k > q - 8)"),
    ("attend expander(degree = 4) | self", "depth < 12 at n = 1024"),
    (f"causal {STRIDED}", "diameter == 2 at n = 1_000_000", "reach(layers = 2) at n = 65_536"),
    ("attend random(keys = 8, seed = 3) | window(radius = 1)", "diameter > 2 at n = 10_000"),
]

FAIL = [
    (WINDOW, "reach(layers = 16) at n = 512", "query 497 has not read key 0 (120 such pairs)"),
    (WINDOW, "depth <= 3 at n = 512", "depth is 17, must be <= 3; for example query 497"),
    (CHUNKS, "depth <= 100 at n = 512", "query 32 never reads key 0"),
    (CHUNKS, "reach(layers = 512) at n = 512", "never reads this key"),
    # dilation alone splits parity
    ("layers 12 attend dilated(radius = 16, step = 2)", "diameter < 9999", "never reads key 1"),
    (DILATIONS, "reach(layers = 99) at n = 64", "query 0 has not read key 1"),
    # a later token is not a way round: it cannot be read by those before it
    ("causal attend global(last(1)) | self", "diameter <= 2 at n = 64", ""),
    # summaries are read before they have read their block
    (BLOCK_FIRST.format(1, 0), "reach(layers = 2) at n = 64", "query 8 has not read key 0"),
    ("causal attend summary(stride = 8, cells = 2)", "rows_nonempty", "query 0 has no key"),
    # not so where heads are told apart
    ("causal attend self", f"{PAPER[:30]} == {CODE[:30]}", ""),
    # a lower triangle of blocks is not a lower triangle of tokens
    ("attend block(size = 16, before = 3)", "causal", "position 0 reads the later position 1"),
    # a last window that is shorter, taken from its end, reads blocks that come later
    ("attend causal | where(q // 16 == 5 and k // 16 == 7)", "causal at n = 128",
     "position 80 reads the later position 112"),
    (f"{GRID} neighborhood(3, 3)", f"{box(4, 8)} == neighborhood(3, 3)", "but not in"),
    # nobody reads the lower rows, which no number of layers mends
    (f"{GRID} {box(4, 8)}", "depth < 99", "never reads"),
    # random blocks that are all the first block
    (f"attend {LOCAL} | columns(first(16))", "diameter <= 5 at n = 1024", "diameter is 63"),
    (f"attend {LOCAL}", f"{DRAWN} subset {LOCAL} | columns(first(16))", ""),
    (f"attend {LOCAL} | {EVERYWHERE} | columns(first(16))", LEAST, ""),
    ("attend causal | block(size = 16)", "causal", "position 0 reads the later position 1"),
    # k > q - w, as in a function that is only meant to be joined with k <= q
    ("attend where(k > q - 8)", "causal", "position 0 reads the later position 1"),
    ("causal attend window(before = 8, after = 0)", "degree <= 8 at n = 99", "degree is 9"),
    ("attend random(keys = 3) | self", "depth < 99 at n = 1024", "other positions and more layers"),
    ("attend window(radius = 9)", "depth <= 3 at n = 100_000", "depth is 11,111, must be <= 3"),
    # an estimate refutes, but does not prove
    ("attend random(keys = 8, seed = 3) | window(radius = 1)", "diameter <= 2 at n = 10_000",
     "diameter is at least "),
    ("attend random(keys = 8, seed = 3) | window(radius = 1)", "diameter <= 99 at n = 10_000",
     "` is only estimated"),
    ("attend random(keys = 8, seed = 3) | window(radius = 1)", "reach(layers = 99) at n = 10_000",
     "is not checked"),
]  # fmt: skip


@pytest.mark.parametrize("case", HOLD, ids=lambda case: f"{case[0]} {case[1]}"[:70])
def test_known_theorems_hold(case: tuple[str, ...]) -> None:
    assert verdicts(*case) == []


@pytest.mark.parametrize(("body", "claim", "words"), FAIL)
def test_mistakes_are_caught(body: str, claim: str, words: str) -> None:
    (message,) = verdicts(body, claim)
    assert words in message


@pytest.mark.parametrize(
    ("sizes", "covered"),
    [(((3, 1), (3, 4), (3, 4)), 1.0), (((3, 4),) * 4, 0.26), (((1, 1), (1, 4), (1, 4)), 0.79)],
)
def test_gaps_of_dilations_must_be_filled(
    sizes: tuple[tuple[int, int], ...], covered: float
) -> None:
    """The part of a nominal receptive field that stacked dilations really reach."""
    layers = " ".join(
        f"layer {layer} {{ attend dilated(radius = {side * step}, step = {step}) }}"
        for layer, (side, step) in enumerate(sizes)
    )
    found = parse(f"attention a {{ layers {len(sizes)} {layers} }}").analyse(400).hops(200)
    nominal = 1 + 2 * sum(side * step for side, step in sizes)
    read = ((found >= 0) & (found <= len(sizes))).sum()
    assert read / nominal == pytest.approx(covered, abs=0.005)


def test_the_receptive_field_of_stacked_windows_adds_up() -> None:
    spec = parse("attention a { layers 4 attend window(radius = 2 ** layer) }")
    found = spec.analyse(200).hops(100)
    assert np.cumsum(np.bincount(found[found >= 0]))[:5].tolist() == [1, 3, 7, 15, 31]


def between(first: str, second: str, n: int) -> Difference:
    one, other = (parse(f"attention a {{ {body} }}") for body in (first, second))
    return diff(one, other, n)


def test_differences_count_the_pairs_of_a_mistake() -> None:
    swapped = between(f"{GRID} {box(4, 8)}", f"{GRID} {box(8, 4)}", 32)
    assert swapped.only_in_a.count + swapped.only_in_b.count == 288
    # (window, 0) of one library keeps the query and as many keys before it, another counts it in
    for window in (1, 8, 512):
        one, other = (f"causal attend window(before = {window - x}, after = 0)" for x in (0, 1))
        found = between(one, other, 1024)
        assert (found.only_in_a.count, found.only_in_b.count) == (1024 - window, 0)
        assert found.only_in_a.examples[0] == (window, 0)
    assert parse(f"attention a {{ causal attend {PAPER} }}").adjacency(256).nnz == 5896


def test_random_keys_alone_leave_keys_unread() -> None:
    unread = parse("attention a { attend random(keys = 3) }").analyse(65_536).unread_keys
    assert unread is not None
    # about one in e ** 3 of them
    assert unread / 65_536 == pytest.approx(math.exp(-3), rel=0.05)


@pytest.mark.parametrize("seed", range(8))
def test_of_equal_paths_one_goes_by_the_first_position_that_serves(seed: int) -> None:
    """Whichever head reads there: the heads of a layer are in no order."""
    spec = parse(f"attention a {{ heads 3 attend random(keys = 2, seed = {seed}) }}")
    report = spec.analyse(11)
    reads = np.asarray(np.stack([spec.mask(11, head=head) for head in range(3)]).any(0))
    for query, key in np.ndindex(11, 11):
        steps = report.path(query, key) or ()
        if len(steps) == 2:
            between = np.flatnonzero(reads[query] & reads[:, key])
            assert [at for *_, at in steps] == [between[0], key]
