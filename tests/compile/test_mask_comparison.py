"""Masks of others held against a spec: counts, counterexamples, polarity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from goldens import Golden
from population import spec_of
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import attnspec
from attnspec.text.diagnostics import AttnSpecError

WINDOW = attnspec.parse("attention near { causal attend window(before = 3, after = 0) }")


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 4)


def off_by_one(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k <= 4)


def first_alone(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (b == 0) & window(b, h, q, k)


HEADS = spec_of("heads 3 attend window(radius = head)")
MASKS = np.stack([HEADS.mask(8, head=head) for head in range(3)])
TWO = spec_of("heads 2 attend window(radius = 2)")
ALIKE = TWO.mask(6)
LAYERS = spec_of("layers 2 input d: ids attend same(d) layer 1 { attend full }")
IDS = np.array([0, 0, 1, 1, 1])
CROSS = spec_of("cross attend where(abs(q * n - k * m) <= 2 * m)")
OTHER = attnspec.parse("attention wider { causal attend window(before = 4, after = 0) }")


def test_masks_are_compared_with_specs_as_approved(golden: Golden) -> None:
    """Whether the masks of the file are those of specs, what differs, and what is not a mask."""

    def ask(call: str) -> tuple[str, object]:
        found = eval(call, globals())
        assert (found.counterexample is None) == found.equal
        return "equal" if found.equal else "turned" if found.turned else "differs", found

    golden.calls(ask)


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


def test_a_function_that_fails_says_how() -> None:
    with pytest.raises(AttnSpecError, match="AttributeError"):
        WINDOW.compare(lambda b, h, q, k: q.nothing, 4)


def test_two_specs_are_compared_as_diff_does() -> None:
    assert str(WINDOW.compare(OTHER, 64)) == str(attnspec.diff(WINDOW, OTHER, 64))


@pytest.mark.parametrize(("m", "n"), [(5, 9), (9, 5), (0, 4), (4, 0), (1, 1)])
def test_a_spec_of_two_sequences_is_held_against_a_mask_of_both(m: int, n: int) -> None:
    spec, mask = CROSS, CROSS.mask(n, m=m)
    assert spec.compare(mask).equal
    assert spec.compare(mask, n, m=m).equal
    turned = spec.compare(~mask)
    assert turned.turned is (m * n > 0)
    assert turned.to_dict()["m"] == m
    whole = spec.compare(lambda b, h, q, k: q >= 0 * k, n, m=m)
    more = whole.heads[0].only_in_b
    assert more is not None
    assert more.count == m * n - mask.sum()
    assert not whole.heads[0].only_in_a
    assert f"m = {m}, n = {n}" in str(whole)
    other = spec.compare(spec_of("cross attend full"), n, m=m)
    assert other.only_in_b.count == m * n - mask.sum()
