"""Facts of a model's mask, held against the pairs of the mask that transformers would make."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import names_restored

import attnspec
from attnspec.integrations.model_attention import _selection
from attnspec.integrations.model_choices import INDICES
from attnspec.integrations.model_layers import crosses
from attnspec.integrations.model_mask import (
    ModelMask,
    WrittenMask,
    axis_of,
    model_mask,
    part_of_inputs,
)
from attnspec.integrations.spec_cache import SpecLayer
from attnspec.integrations.transformers import register

masking = pytest.importorskip("transformers.masking_utils")
transformers = pytest.importorskip("transformers")

CAUSAL = masking.causal_mask_function
INDEXER = SimpleNamespace(layer_types=["full_attention", "indexed_attention"])


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


def facts_of(**settings: Any) -> ModelMask:
    found = model_mask(**settings)
    assert isinstance(found, ModelMask)
    return found


def test_padding_is_what_is_not_real_of_the_positions_so_far() -> None:
    for offset, queries, width, zeros in product((0, 2), (1, 3), (2, 3, 5, 7), ((), (0,), (1,))):
        given = torch.ones(2, width, dtype=torch.long)
        given[1, list(zeros)] = 0
        end = offset + queries
        real = [[j < width and bool(given[b, j]) for j in range(end)] for b in range(2)]
        facts = facts_of(
            q_length=queries,
            kv_length=9,
            q_offset=offset,
            mask_function=CAUSAL,
            attention_mask=given,
        )
        assert (facts.padding is None) == all(map(all, real))
        if facts.padding is not None:
            assert facts.padding.tolist() == real
        assert facts.left_padded == any(not row[0] for row in real)
        assert (facts.kind, facts.end, facts.kv_length, facts.kv_offset) == ("causal", end, 9, 0)


def test_a_mask_is_written_out_for_layers_that_choose_keys() -> None:
    for offset, queries, extra, padded in product((0, 3), (1, 4), (0, 2), (False, True)):
        end = offset + queries
        given = torch.ones(2, end, dtype=torch.long)
        given[1, 0] = given[0, end - 1] = int(not padded)
        settings: dict[str, Any] = {
            "q_length": queries,
            "kv_length": end + extra,
            "q_offset": offset,
            "attention_mask": given,
            "batch_size": 2,
        }
        mask = model_mask(mask_function=CAUSAL, config=INDEXER, **settings)
        assert isinstance(mask, WrittenMask)
        meant = [
            [
                [k <= offset + q and bool(given[b, k]) for k in range(end + extra)]
                for q in range(queries)
            ]
            for b in range(2)
        ]
        assert mask.as_subclass(torch.Tensor)[:, 0].tolist() == meant
        facts = facts_of(mask_function=CAUSAL, **settings)
        for made in (mask, mask.to(torch.float32), mask[:, :, -1:]):
            assert isinstance(made, WrittenMask)
            assert made.facts is not None
            assert (made.facts.q_offset, made.facts.q_length) == (facts.q_offset, facts.q_length)
    both_ways = masking.bidirectional_mask_function
    assert facts_of(q_length=2, kv_length=2, mask_function=both_ways, config=INDEXER).end == 2
    alone = model_mask(q_length=2, kv_length=2, mask_function=CAUSAL, config=INDEXER)
    assert isinstance(alone, WrittenMask)
    assert alone.shape == (1, 1, 2, 2)


def test_what_a_layer_chose_is_told_from_its_mask() -> None:
    indexed, plain = torch.nn.Module(), torch.nn.Module()
    indexed.indexer = torch.nn.Identity()
    given = torch.tensor([[1, 1, 0]])
    facts = facts_of(q_length=3, kv_length=5, mask_function=CAUSAL, attention_mask=given)
    settings = {"q_length": 3, "kv_length": 5, "attention_mask": given}
    written = model_mask(mask_function=CAUSAL, config=INDEXER, **settings)  # type: ignore[arg-type]
    assert isinstance(written, WrittenMask)
    listed, none = {INDICES: torch.zeros(1, 3, 2)}, {INDICES: None}
    bare = written.as_subclass(torch.Tensor)[..., :3]
    # a layer without an indexer chose nothing
    assert _selection(plain, bare, listed, 3) == (bare, None)
    assert _selection(indexed, facts, listed, 5) == (facts, None)
    # what it lists it chose; then its mask is one like any other
    assert _selection(indexed, written, listed, 5)[0] is written.facts
    assert _selection(indexed, bare, listed, 3) == (bare, None)
    # what it does not list stands in the mask, in numbers that are added, too
    for mask in (written, torch.where(bare, 0.0, -torch.inf), bare):
        held, selected = _selection(indexed, mask, none, mask.shape[-1])
        assert isinstance(held, ModelMask)
        assert (held.kind, held.q_length, held.end, held.padding) == ("causal", 3, 3, None)
        assert selected is not None
        assert torch.equal(selected.as_subclass(torch.Tensor), bare)
    late = _selection(indexed, torch.ones(1, 1, 2, 5, dtype=torch.bool), none, 5)[0]
    assert isinstance(late, ModelMask)
    assert (late.q_offset, late.end, late.kv_length, late.kv_offset) == (3, 5, 5, 0)
    with pytest.raises(attnspec.AttnSpecError, match="5 keys whose last is read by no sample"):
        _selection(indexed, torch.zeros(1, 1, 2, 5, dtype=torch.bool), none, 5)


def test_keys_of_a_cache_that_begins_later_and_has_slots_to_spare() -> None:
    spec = attnspec.parse("attention near { attend window(before = 2, after = 0) }")
    module = SimpleNamespace(is_causal=True, layer_idx=0, training=False)
    attention = transformers.AttentionInterface()[register(spec, name="near_by")]
    x = torch.randn(3, 1, 2, 9, 8)
    q, k, v = x
    real = torch.ones(1, 9, dtype=torch.bool)
    real[0, 5] = False
    whole = spec.compile()(q, k, v, key_padding_mask=real)[:, :, 7:].transpose(1, 2)
    for first, spare in product((0, 3, 5), (0, 2)):
        slots = torch.full((1, 2, spare, 8), 3.0)
        key, value = (torch.cat([y[:, :, first:], slots], 2) for y in (k, v))
        mask = ModelMask("causal", 2, 7, 9 - first + spare, first, real)
        found = attention(module, q[:, :, 7:], key, value, mask)[0]
        assert (found - whole).abs().max() < 1e-5


def test_inputs_are_cut_along_their_axis_of_positions() -> None:
    text = "attention a { input d: ids input m: tokens input c: choices attend chosen(c) & same(d)"
    program = attnspec.parse(text + " | columns(m) }").program
    d, m = torch.arange(6), torch.arange(12).view(2, 6) % 2 == 0
    c = torch.arange(24).view(1, 1, 6, 4)
    keys, queries = slice(2, None), slice(1, 3)
    found = part_of_inputs(program, {"d": d[None], "m": m, "c": c}, keys, queries)
    assert found is not None
    assert torch.equal(found["d"], d[None, 2:])
    assert torch.equal(found["m"], m[:, 2:])
    assert torch.equal(found["c"], c[:, :, 1:3])
    assert part_of_inputs(program, None, keys) is None
    assert axis_of(None, d) is axis_of("ids", "no tensor") is axis_of("choices", d) is None


def test_an_attention_that_reads_another_sequence_says_so_in_one_of_three_ways() -> None:
    kind = type("BartCrossAttention", (torch.nn.Module,), {})
    assert crosses(kind())
    for cross, decoder, causal in product((None, False, True), repeat=3):
        module = torch.nn.Module()
        said = {"is_cross_attention": cross, "is_decoder": decoder, "is_causal": causal}
        for name, value in said.items():
            if value is not None:
                setattr(module, name, value)
        assert crosses(module) == (cross is True or (decoder is True and causal is False))


def test_a_layer_of_a_cache_that_nothing_was_written_to() -> None:
    layer = SpecLayer()
    assert layer.batch_size == -1
    assert not layer.is_initialized
    layer.batch_repeat_interleave(2)
    assert layer.state is None
