"""Masks of others held against a spec: counts, counterexamples, polarity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from population import spec_of
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import attnspec
from attnspec.text.diagnostics import AttnSpecError

WINDOW = attnspec.parse("attention near { causal attend window(before = 3, after = 0) }")


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 4)


def off_by_one(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k <= 4)


@pytest.mark.parametrize("n", [0, 1, 17, 130])
def test_equal_masks_are_equal(n: int) -> None:
    for mask in (window, WINDOW.mask(n), torch.from_numpy(WINDOW.mask(n))[None, None]):
        found = WINDOW.compare(mask, n)
        assert found.equal
        assert found.counterexample is None


def test_a_block_mask_is_its_function() -> None:
    assert WINDOW.compare(create_block_mask(window, 1, 1, 64, 64, "cpu"), 64).equal
    # one that has a length needs none beside it
    for n in (1, 64, 300):
        assert WINDOW.compare(create_block_mask(window, None, None, n, n, "cpu")).n == n
        assert WINDOW.compare(create_block_mask(window, 1, 1, n, n, "cpu")).equal
    with pytest.raises(AttnSpecError, match=r"must be of \[65, 65\], got one of \[64, 64\]"):
        WINDOW.compare(create_block_mask(window, 1, 1, 64, 64, "cpu"), 65)


def test_a_block_mask_whose_lists_say_something_else_is_refused() -> None:
    """Compiled, FlexAttention reads lists and function, uncompiled the function alone."""
    own = create_block_mask(window, 1, 1, 300, 300, "cpu")
    lists = own.kv_num_blocks, own.kv_indices, own.full_kv_num_blocks, own.full_kv_indices
    bare = BlockMask.from_kv_blocks(*lists, seq_lengths=(300, 300))
    with pytest.raises(AttnSpecError, match=r"lists .* disagree in head 0 at \(0, 128\)"):
        WINDOW.compare(bare)
    fewer = BlockMask.from_kv_blocks(
        own.kv_num_blocks.clamp(max=1), *lists[1:], mask_mod=window, seq_lengths=(300, 300)
    )
    with pytest.raises(AttnSpecError, match=r"disagree in head 0 at \(128, 128\)"):
        WINDOW.compare(fewer)
    full = torch.ones_like(own.kv_num_blocks)
    more = BlockMask.from_kv_blocks(
        *lists[:2], full, own.kv_indices, mask_mod=window, seq_lengths=(300, 300)
    )
    with pytest.raises(AttnSpecError, match="disagree"):
        WINDOW.compare(more)


def test_a_difference_has_counts_and_a_counterexample() -> None:
    found = WINDOW.compare(off_by_one, 10)
    assert not found.equal
    assert found.counterexample == (0, 4, 0)
    assert (found.heads[0].only_in_spec.count, found.heads[0].only_in_mask.count) == (0, 6)
    assert found.heads[0].in_both == WINDOW.mask(10).sum()
    text = str(found)
    assert "True in the mask = attends" in text
    assert "query 4 reads 1..4 in the spec, 0..4 in the mask" in text
    assert found.to_dict()["counterexample"] == (0, 4, 0)


def test_a_mask_the_wrong_way_round_is_said_to_be() -> None:
    found = WINDOW.compare(~WINDOW.mask(9))
    assert found.turned
    assert "compare with `~mask`" in str(found)
    assert not WINDOW.compare(off_by_one, 9).turned


def test_heads_are_compared_each_with_its_own() -> None:
    spec = spec_of("heads 3 attend window(radius = head)")
    masks = np.stack([spec.mask(8, head=head) for head in range(3)])
    assert spec.compare(masks).equal
    found = spec.compare(masks[::-1])
    assert [head.equal for head in found.heads] == [False, True, False]
    assert spec.compare(masks[1], head=1).equal
    assert spec.compare(lambda b, h, q, k: (q - k).abs() <= h, 8).equal


def test_a_mask_of_other_heads_is_refused() -> None:
    spec = spec_of("heads 2 attend window(radius = 2)")
    mask = spec.mask(6)
    assert spec.compare(mask).equal
    assert spec.compare(mask[None], head=1).equal
    for given in (np.stack([mask, mask, ~mask, ~mask]), mask[None], torch.from_numpy(mask[None])):
        with pytest.raises(AttnSpecError, match=rf"{len(given)} heads, and the spec 2"):
            spec.compare(given)


def test_a_function_of_the_sample_is_refused() -> None:
    def first_alone(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (b == 0) & window(b, h, q, k)

    with pytest.raises(AttnSpecError, match=r"samples 0 and 1 differ in head 0 at \(0, 0\)"):
        WINDOW.compare(first_alone, 6)
    assert WINDOW.compare(lambda b, h, q, k: first_alone(b * 0, h, q, k), 6).equal


def test_layers_and_inputs_are_chosen() -> None:
    spec = spec_of("layers 2 input d: ids attend same(d) layer 1 { attend full }")
    ids = np.array([0, 0, 1, 1, 1])
    assert spec.compare(np.ones((5, 5), bool), layer=1).equal
    assert spec.compare(ids[:, None] == ids[None], inputs={"d": ids}).equal


def test_two_specs_are_compared_as_diff_does() -> None:
    other = attnspec.parse("attention wider { causal attend window(before = 4, after = 0) }")
    assert str(WINDOW.compare(other, 64)) == str(attnspec.diff(WINDOW, other, 64))


@pytest.mark.parametrize(
    ("mask", "n", "error", "words"),
    [
        (np.zeros((4, 4)), None, AttnSpecError, "mask == 0"),
        (np.zeros((4, 5), bool), None, AttnSpecError, r"got \[4, 5\]"),
        (np.zeros((4, 4), bool), 5, AttnSpecError, r"must be \[5, 5\]"),
        (window, None, ValueError, r"compare\(mask_mod, n\)"),
        (WINDOW, None, ValueError, r"compare\(spec, n\)"),
        ("window", None, TypeError, "got str"),
        (3, 4, TypeError, "got int"),
        (lambda b, h, q, k: q.nothing, 4, AttnSpecError, "AttributeError"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    mask: Any, n: int | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        WINDOW.compare(mask, n)


@pytest.mark.parametrize(("m", "n"), [(5, 9), (9, 5), (0, 4), (4, 0), (1, 1)])
def test_a_spec_of_two_sequences_is_held_against_a_mask_of_both(m: int, n: int) -> None:
    spec = spec_of("cross attend where(abs(q * n - k * m) <= 2 * m)")
    mask = spec.mask(n, m=m)
    assert spec.compare(mask).equal
    assert spec.compare(mask, n, m=m).equal
    turned = spec.compare(~mask)
    assert turned.turned is (m * n > 0)
    assert turned.to_dict()["m"] == m
    whole = spec.compare(lambda b, h, q, k: q >= 0 * k, n, m=m)
    assert whole.heads[0].only_in_mask.count == m * n - mask.sum()
    assert whole.heads[0].only_in_spec.count == 0
    assert f"m = {m}, n = {n}" in str(whole)
    other = spec.compare(spec_of("cross attend full"), n, m=m)
    assert other.only_in_b.count == m * n - mask.sum()


def test_lengths_of_two_sequences_that_do_not_fit_are_refused() -> None:
    spec = spec_of("cross attend window(radius = 2)")
    mask = spec.mask(9, m=5)
    for n, m, words in (
        (9, 4, r"must be \[4, 9\]"),
        (8, None, r"must be \[5, 8\], or \[H, 5, 8\]"),
        (None, 3, r"must be \[3, 9\]"),
    ):
        with pytest.raises(AttnSpecError, match=words):
            spec.compare(mask, n, m=m)
    with pytest.raises(AttnSpecError, match="has one sequence"):
        spec_of("attend full").compare(mask, m=5)
    with pytest.raises(AttnSpecError, match=r"must be \[9, 9\]"):
        spec_of("attend full").compare(mask)
