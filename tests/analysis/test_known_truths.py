"""What is known of attention patterns, and mistakes of the field, written as specs with claims."""

from __future__ import annotations

import math

import numpy as np
import pytest
from zoo import EXAMPLES

from attnspec.analysis.reach import reach
from attnspec.graphs.stack import Stack
from attnspec.show.differences import Difference
from attnspec.spec import diff, load, parse


def verdicts(body: str, *claims: str) -> list[str]:
    """What `check` says of claims: nothing where all hold."""
    required = " ".join(f"require {claim}" for claim in claims)
    found = parse(f"attention a {{ {body} {required} }}").check()
    return [d.message for d in found if d.code.startswith("A6")]


def stack(body: str) -> Stack:
    return parse(f"attention a {{ {body} }}").stack()


def read_by(stack: Stack, n: int, query: int) -> list[int]:
    """How many keys a query has read after 0, 1, 2, … layers."""
    found = reach.hops(stack, n, query)
    counts: list[int] = np.cumsum(np.bincount(found[found >= 0])).tolist()
    return counts


def between(first: str, second: str, n: int) -> Difference:
    one, other = (parse(f"attention a {{ {body} }}") for body in (first, second))
    return diff(one, other, n)


# --- reach ----------------------------------------------------------------------------------------


def test_a_causal_window_of_32_keys_needs_17_layers_at_512() -> None:
    body = "causal attend window(before = 31, after = 0)"
    assert verdicts(body, "depth == 17 at n = 512", "reach(layers = 17) at n = 512") == []
    (message,) = verdicts(body, "reach(layers = 16) at n = 512")
    assert message.endswith(
        "after 16 layers query 497 has not read 0 (120 such pairs); that takes 17,"
        " 497 -> 466 (layer 16) -> 435 (layer 15) -> … 14 more … -> 0 (layer 0)"
    )
    (message,) = verdicts(body, "depth <= 3 at n = 512")
    assert "depth is 17, must be <= 3; for example 497 -> 0 takes 17 layers: 497 -> 466" in message


def test_causal_chunks_never_join_all_pairs() -> None:
    body = "causal attend block(size = 32)"
    (message,) = verdicts(body, "depth <= 100 at n = 512")
    assert message.endswith("some allowed pair is never joined: query 32 never reads 0")
    (message,) = verdicts(body, "reach(layers = 512) at n = 512")
    assert "query 32 has not read 0" in message
    assert message.endswith("no layer ever joins them")
    # a second head with chunks half a chunk further on joins them
    shifted = (
        "heads 2 attend block(size = 32) head 1 { attend where((q + 16) // 32 == (k + 16) // 32) }"
    )
    assert verdicts(f"causal {shifted}", "reach(layers = 31) at n = 512") == []


def test_dilation_alone_splits_parity() -> None:
    body = "layers 12 heads 2 attend dilated(radius = 16, step = 2)"
    (message,) = verdicts(body, "diameter < 9999")
    assert "query 0 never reads 1" in message
    # so do several dilations that share a factor, whatever their radii
    heads = "heads 3 attend dilated(radius = 8 * 2 ** (head + 1), step = 2 ** (head + 1))"
    (message,) = verdicts(heads, "reach(layers = 99) at n = 64")
    assert "query 0 has not read 1" in message
    # one head without gaps is enough
    mended = f"{heads} head 2 {{ attend window(radius = 1) }}"
    assert verdicts(mended, "depth < 99 at n = 64") == []


@pytest.mark.parametrize("n", [64, 100, 1000])
def test_strided_or_local_takes_two_hops(n: int) -> None:
    merged = "attend strided(stride = isqrt(n))"
    two_heads = (
        "heads 2 attend window(before = isqrt(n), after = 0)"
        " head 1 { attend residue(step = isqrt(n)) }"
    )
    for body in (merged, f"causal {merged}", f"causal {two_heads}"):
        assert verdicts(body, f"diameter == 2 at n = {n}", f"depth == 2 at n = {n}") == []


@pytest.mark.parametrize("tokens", ["first(1)", "last(1)", "positions(5)", "every(100)"])
@pytest.mark.parametrize("local", ["self", "window(radius = 3)", "random(keys = 2)"])
def test_any_global_token_makes_the_diameter_at_most_two(tokens: str, local: str) -> None:
    claim = "diameter <= 2 at n = 7, 64, 257, 10_000"
    assert verdicts(f"attend global({tokens}) | {local}", claim) == []


def test_under_causal_a_global_token_needs_to_come_first() -> None:
    # a later token is no way round: it cannot be read by those before it
    assert verdicts("causal attend global(first(1)) | self", "diameter <= 2 at n = 64") != []
    assert verdicts("causal attend global(every(8)) | window(radius = 7)", "diameter <= 2") == []


def test_the_order_of_the_two_parts_of_the_fixed_pattern_matters() -> None:
    body = "causal layers 2 layer %d { attend block(size = 8) }"
    body += " layer %d { attend summary(stride = 8, cells = 1) | self }"
    assert verdicts(body % (0, 1), "reach(layers = 2) at n = 64") == []
    # summaries are read before they have read their block
    (message,) = verdicts(body % (1, 0), "reach(layers = 2) at n = 64")
    assert "after 2 layers query 8 has not read 0" in message
    assert "no layer ever joins them" in message


def test_the_fixed_pattern_may_begin_with_summaries_if_it_ends_with_them() -> None:
    block, cells = "block(size = 8)", "summary(stride = 8, cells = 1) | self"
    layers = " ".join(
        f"layer {layer} {{ attend {graph} }}" for layer, graph in enumerate((cells, block, cells))
    )
    assert verdicts(f"causal layers 3 {layers}", "reach(layers = 3) at n = 64") == []
    # and alone they leave the first queries without a key
    (message,) = verdicts("causal attend summary(stride = 8, cells = 2)", "rows_nonempty")
    assert "query 0 has no key" in message


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_strided_pattern_works_in_both_orders(order: tuple[int, int]) -> None:
    parts = "window(before = isqrt(n), after = 0)", "residue(step = isqrt(n))"
    layers = " ".join(f"layer {at} {{ attend {parts[part]} }}" for at, part in enumerate(order))
    spec = parse(f"attention a {{ causal layers 2 {layers} require reach(layers = 2) }}")
    assert [verdict.status for verdict in spec.verdicts] == ["proven"]


def test_merged_strides_of_the_paper_and_of_the_code_are_one_set() -> None:
    # the paper's window has one key more, which the stride reads anyway
    paper = "window(before = 16, after = 0) | residue(step = 16)"
    code = "window(before = 15, after = 0) | residue(step = 16)"
    claim = f"{paper} == {code}"
    assert verdicts("causal attend self", claim, f"{claim} at n = 65_536") == []
    # not so where heads are told apart, nor both ways
    assert verdicts("causal attend self", claim.replace(" | residue(step = 16)", "")) != []
    assert parse(f"attention a {{ causal attend {paper} }}").adjacency(256).nnz == 5896


@pytest.mark.parametrize(
    ("sizes", "covered"),
    [(((3, 1), (3, 4), (3, 4)), 1.0), (((3, 4),) * 4, 0.26), (((1, 1), (1, 4), (1, 4)), 0.79)],
)
def test_gaps_of_dilations_must_be_filled(
    sizes: tuple[tuple[int, int], ...], covered: float
) -> None:
    # the part of a nominal receptive field that stacked dilations really reach
    layers = " ".join(
        f"layer {layer} {{ attend dilated(radius = {side * step}, step = {step}) }}"
        for layer, (side, step) in enumerate(sizes)
    )
    read = read_by(stack(f"layers {len(sizes)} {layers}"), 400, 200)
    nominal = 1 + 2 * sum(side * step for side, step in sizes)
    assert read[len(sizes)] / nominal == pytest.approx(covered, abs=0.005)


def test_the_receptive_field_of_stacked_windows_adds_up() -> None:
    read = read_by(stack("layers 4 attend window(radius = 2 ** layer)"), 200, 100)
    assert read[:5] == [1, 3, 7, 15, 31]


# --- mistakes of the field ------------------------------------------------------------------------


def test_a_unidirectional_layout_of_blocks_reads_the_future_inside_its_blocks() -> None:
    # a lower triangle of blocks is no lower triangle of tokens
    layout = "attend block(size = 16, before = 3)"
    (message,) = verdicts(layout, "causal")
    assert "position 0 reads the later position 1" in message
    assert verdicts(f"causal {layout}", "causal") == []
    # and a last window that is shorter, taken from its end, reads blocks that come later
    last = "attend causal | where(q // 16 == 5 and k // 16 == 7)"
    (message,) = verdicts(last, "causal at n = 128")
    assert "position 80 reads the later position 112" in message


def test_a_neighbourhood_with_swapped_axes_is_caught() -> None:
    def box(height: int, width: int) -> str:
        return (
            f"where(abs(min(max(q.row, 1), {height} - 2) - k.row) <= 1"
            f" and abs(min(max(q.col, 1), {width} - 2) - k.col) <= 1)"
        )

    grid = "sequence grid(8, 4) attend neighborhood(3, 3)"
    assert verdicts(grid, f"{box(8, 4)} == neighborhood(3, 3)") == []
    (message,) = verdicts(grid, f"{box(4, 8)} == neighborhood(3, 3)")
    assert "is only in the first graph" in message
    wrong, right = (
        parse(f"attention a {{ sequence grid(8, 4) attend {box(*extents)} }}").mask(32)
        for extents in ((4, 8), (8, 4))
    )
    assert (wrong != right).sum() == 288
    shape = "sequence grid(8, 4)"
    found = between(f"{shape} attend {box(4, 8)}", f"{shape} attend {box(8, 4)}", 32)
    assert found.only_in_a.count + found.only_in_b.count == 288
    # nobody reads the lower rows, which no number of layers mends
    (message,) = verdicts(f"sequence grid(8, 4) attend {box(4, 8)}", "depth < 99")
    assert "never reads" in message
    assert verdicts(f"sequence grid(8, 4) attend {box(8, 4)}", "depth < 99") == []


def test_random_blocks_that_are_all_the_first_block_are_caught() -> None:
    local = "block(size = 16, before = 1, after = 1)"
    drawn = "random_blocks(size = 16, blocks = 3, seed = 7)"
    repeated = "columns(first(16))"
    assert verdicts(f"attend {local} | {drawn}", "diameter <= 5 at n = 1024") == []
    (message,) = verdicts(f"attend {local} | {repeated}", "diameter <= 5 at n = 1024")
    assert "diameter is 63, must be <= 5; for example " in message
    assert verdicts(f"attend {local} | {repeated}", f"{drawn} subset {local} | {repeated}") != []
    # with global blocks the diameter hides it, the number of pairs does not
    everywhere = "global(first(16) | last(16))"
    least = "edges >= n * 16 * 7 at n = 1024"
    assert verdicts(f"attend {local} | {everywhere} | {drawn}", least) == []
    assert verdicts(f"attend {local} | {everywhere} | {repeated}", least) != []


def test_a_mask_of_what_is_left_out_joins_by_the_other_operator() -> None:
    # libraries whose masks say what is hidden write a chunked causal mask with "or"
    hidden = "~(~causal | ~block(size = 16))"
    assert verdicts(f"attend {hidden}", f"{hidden} == causal & block(size = 16)", "causal") == []
    (message,) = verdicts("attend causal | block(size = 16)", "causal")
    assert "position 0 reads the later position 1" in message


def test_a_sliding_window_without_its_causal_half_reads_the_future() -> None:
    # k > q - w, as in a function that is only meant to be joined with k <= q
    overlay = "where(k > q - 8)"
    (message,) = verdicts(f"attend {overlay}", "causal")
    assert "position 0 reads the later position 1" in message
    same = "require window(before = 7, after = 0) == where(k > q - 8)"
    spec = parse(f"attention a {{ causal attend {overlay} {same} require degree <= 8 }}")
    assert [verdict.status for verdict in spec.verdicts] == ["proven", "checked"]


@pytest.mark.parametrize("window", [1, 8, 512])
def test_windows_of_one_name_differ_by_a_key(window: int) -> None:
    # (window, 0) of one library keeps the query and as many keys before it, another counts it in
    body = f"causal attend window(before = {window}, after = 0)"
    counted_in = f"causal attend window(before = {window - 1}, after = 0)"
    found = between(body, counted_in, n=1024)
    assert found.only_in_a.count == 1024 - window
    assert found.only_in_a.examples[0] == (window, 0)
    assert found.only_in_b.count == 0
    (message,) = verdicts(body, f"degree <= {window} at n = 1024")
    assert f"degree is {window + 1}, must be <= {window}; for example query {window}" in message


def test_random_keys_alone_leave_keys_unread() -> None:
    (message,) = verdicts("attend random(keys = 3) | self", "depth < 99 at n = 1024")
    assert "some allowed pair is never joined" in message
    # about one in e ** 3 of them
    unread = parse("attention a { attend random(keys = 3) }").analyse(65_536).unread_keys
    assert unread is not None
    assert unread / 65_536 == pytest.approx(math.exp(-3), rel=0.05)
    assert verdicts("attend expander(degree = 4) | self", "depth < 12 at n = 1024") == []


def test_longlora_needs_its_shifted_heads() -> None:
    spec = load(EXAMPLES / "longlora.attn", group=16)
    assert reach.depth(spec.stack(), 256).value is not None
    alone = parse("attention a { causal attend block(size = 16) }")
    assert reach.depth(alone.stack(), 256).value is None


# --- any length -----------------------------------------------------------------------------------


def test_claims_at_long_lengths() -> None:
    body = "causal attend strided(stride = isqrt(n))"
    assert verdicts(body, "diameter == 2 at n = 1_000_000", "reach(layers = 2) at n = 65_536") == []
    (message,) = verdicts("attend window(radius = 9)", "depth <= 3 at n = 100_000")
    assert "depth is 11,111, must be <= 3; for example 0 -> " in message


def test_an_estimate_refutes_but_does_not_prove() -> None:
    body = "attend random(keys = 8, seed = 3) | window(radius = 1)"
    (message,) = verdicts(body, "diameter <= 2 at n = 10_000")
    assert "does not hold" in message
    assert "diameter is at least " in message
    assert verdicts(body, "diameter > 2 at n = 10_000") == []
    (message,) = verdicts(body, "diameter <= 99 at n = 10_000")
    assert "is not checked: it is estimated" in message
    (message,) = verdicts(body, "reach(layers = 99) at n = 10_000")
    assert "is not checked" in message
    (message,) = verdicts(body, "reach(layers = 2) at n = 10_000")
    assert "after 2 layers query 0 has not read" in message
