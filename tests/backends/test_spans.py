"""How sums of features are cut into parts: every number once, in the part that it belongs to."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from attnspec.backends.factored.features.maps import Elementwise
from attnspec.backends.factored.features.quotients import Quotient
from attnspec.backends.factored.features.spans import Given, Summing, Sums, shares

HOW = Summing(Elementwise("relu"), causal=True, quotient=Quotient())


def given_of(batch: int, heads: int, repeat: int, n_q: int, n_k: int) -> Given:
    """Numbers that all differ; of tables one for each key head, and one for all."""

    def numbered(*shape: int) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)

    return Given(
        numbered(batch, heads, repeat, n_q, 2),
        numbered(batch, heads, n_k, 2),
        numbered(batch, heads, n_k, 3),
        numbered(batch, n_k) % 3 > 0,
        (numbered(batch, heads, n_k), -numbered(batch, heads, n_k)),
        {"own": numbered(heads, 4, 2), "shared": numbered(1, 4)},
    )


def test_parts_are_those_of_their_samples_and_heads() -> None:
    for batch, heads, repeat, block in product((1, 3), (1, 2, 5), (1, 2), (1, 60, 1000)):
        given = given_of(batch, heads, repeat, 3, 4)
        into, seen = given.gradients(), torch.zeros(batch, heads)
        for x in (into.q, into.k, into.v):
            x.zero_()
        for share in shares(replace(HOW, block=block), given):
            part, target = given.part(share), into.part(share)
            assert part.gate is not None
            assert part.padding is not None
            # as much as a block holds, or one head of one sample
            assert part.k.shape[:2].numel() in range(1, max(1, block // (3 * repeat * 4)) + 1)
            seen[share] += 1
            each = product(range(batch)[share[0]], range(heads)[share[1]])
            for (b, h), (i, j) in zip(each, product(*map(range, part.k.shape[:2])), strict=True):
                for mine, whole in ((part.q, given.q), (part.k, given.k), (part.v, given.v)):
                    assert torch.equal(mine[i, j], whole[b, h])
                for mine, whole in zip(part.gate, given.gate or (), strict=True):
                    assert torch.equal(mine[i, j], whole[b, h])
                assert torch.equal(part.padding[i], given_padding(given)[b])
                assert torch.equal(part.tables["own"][j], given.tables["own"][h])
            assert torch.equal(part.tables["shared"], given.tables["shared"])
            # what is added to a part is added to the whole
            for x in (target.q, target.k, target.v, *(target.gate or ()), *target.tables.values()):
                x += 1
        assert seen.eq(1).all()
        assert {x.eq(1).all().item() for x in (into.q, into.k, into.v, *(into.gate or ()))} == {
            True
        }
        # tables are of all samples, and the shared one of all heads
        count = len(shares(replace(HOW, block=block), given))
        assert into.tables["shared"].eq(count).all()
        assert into.tables["own"].sum() == into.tables["own"][0].sum() * heads


def given_padding(given: Given) -> torch.Tensor:
    assert given.padding is not None
    return given.padding


def test_rows_of_queries_stand_chunk_by_chunk() -> None:
    for batch, heads, repeat, causal in product((1, 2), (1, 3), (1, 2), (False, True)):
        given = given_of(batch, heads, repeat, 7, 9)
        how = replace(HOW, chunk=3, causal=causal, block=200)
        sums = Sums(how, given)
        # as many positions as a block has room for the widest rows of all heads, or one
        each = max(given.q.shape[-1], given.v.shape[-1]) * batch * heads * repeat
        assert sums.most == max(1, how.block // each)
        for span in sums.spans:
            c, count = span.chunk, (span.high - span.low) // span.chunk
            found = sums.chunked(sums.queries(span), span)
            assert found.shape == (batch * heads, count, repeat * c, 2)
            for b, h, s, r, i in product(*map(range, (batch, heads, count, repeat, c))):
                at = span.low - sums.first + s * c + i
                assert torch.equal(found[b * heads + h, s, r * c + i], given.q[b, h, r, at])
            part = given.q[:, :, :, span.low - sums.first : span.high - sums.first]
            assert torch.equal(sums.unchunked(found, span), part)


def test_spans_are_all_positions_one_after_the_other() -> None:
    for n_k, chunk, causal in product((0, 1, 5, 8, 17), (1, 3, 8), (False, True)):
        for n_q, most in product(range(0, n_k + 1, 2), (None, 1, 4, 7)):
            how = replace(HOW, chunk=chunk, causal=causal, block=40)
            sums = Sums(how, given_of(1, 2, 1, n_q, n_k), most)
            for spans, low, high in (
                (sums.before, 0, n_k - n_q if causal else n_k),
                (sums.spans, n_k - n_q, n_k),
            ):
                at = [place for span in spans for place in range(span.low, span.high)]
                assert at == [*range(low, high)]
                for span in spans:
                    # whole chunks, and no more than there is room for, but for one chunk
                    assert (span.high - span.low) % span.chunk == 0
                    assert span.high - span.low <= max(sums.most, chunk if causal else 0)
            if causal:
                assert all(span.chunk <= chunk for span in sums.spans)
