"""Models that choose keys for each query by themselves, against their own eager code; `lsh` in the
conventions of Hugging Face against Reformer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from model_families import CHOOSING
from sweeps import few
from tiny_models import CAUSAL, TOLERANCE, called, difference, named, tiny, tokens, transformers
from torch import Tensor

import attnspec
from attnspec.integrations.transformers import SpecCache, convert, register

NEAR = "attention near { causal attend window(before = 2, after = 0) }"


def pieces(model: Any, cache: Any) -> Tensor:
    """What a model makes of a text that it reads in pieces."""
    with torch.no_grad():
        return torch.cat(
            [
                model(input_ids=x, past_key_values=cache, use_cache=True).last_hidden_state
                for x in torch.split(tokens(2, 13), [9, 1, 3], 1)
            ],
            1,
        )


def states(model: Any) -> list[Tensor]:
    """What a model makes of a text, of one with padding, and of one that it reads in pieces."""
    mask = torch.ones(3, 2, 13, dtype=torch.long)
    mask[2, 0, 9:] = 0
    if "MiniMax" not in type(model).__name__:
        # its indexer scores padding too, so what it chooses depends on what stands there
        mask[1, 0, :4] = 0
    with torch.no_grad():
        found = [model(tokens(2, 13), attention_mask=x)[0] * x[..., None] for x in mask]
    return [*found, pieces(model, transformers.DynamicCache(config=model.config))]


@pytest.mark.parametrize("name", few(CHOOSING, 4))
def test_a_model_that_chooses_keys_reads_those_of_its_spec(name: str) -> None:
    stem, settings = CHOOSING[name]
    model = tiny(stem, **settings)
    wanted = states(model)
    texts = [CAUSAL]
    if name == "MiniMax M3":
        texts.append("attention taken { input x: choices(size = 4) causal attend chosen(x) }")
    for text in texts:
        model.set_attn_implementation(named(text))
        for found, right in zip(states(model), wanted, strict=True):
            assert difference(found, right) < TOLERANCE
    model.set_attn_implementation("eager")
    for text in (CAUSAL, NEAR):
        with convert(model, attnspec.parse(text)):
            given, cache = states(model), SpecCache(model)
            assert (difference(given[0], wanted[0]) < TOLERANCE) is (text == CAUSAL)
            for _ in range(2):
                # what the choice goes by is kept, as long as the cache is
                assert difference(pieces(model, cache), given[-1]) < TOLERANCE
                assert cache.bytes > 0
                cache.reset()


STATIC = {"cache_implementation": "static"}


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, STATIC])
def test_a_model_that_chooses_writes_as_with_its_own_cache(how: dict[str, Any]) -> None:
    stem, settings = CHOOSING["DeepSeek V3.2"]
    model = tiny(stem, "ForCausalLM", **{**settings, "eos_token_id": None})
    # before there are as many keys as it chooses, it chooses empty slots, too
    ids = tokens(1, 2) if how == STATIC else tokens(1, 9).repeat(1, 2)
    given: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, **how}
    wanted = model.generate(ids, **given)
    with convert(model, attnspec.parse(CAUSAL)):
        for cache in ({}, {"past_key_values": SpecCache(model)})[: 1 + (how != STATIC)]:
            assert model.generate(ids, **cache, **given).tolist() == wanted.tolist()


def test_check_finite_can_be_switched_between_calls() -> None:
    module = attnspec.parse(CAUSAL).compile()
    name, wrong = register(module, "attnspec_checked"), torch.full((1, 2, 4, 8), torch.nan)
    for asked in (False, True, False):
        module.check_finite = asked
        with pytest.raises(ValueError, match="k must be finite") if asked else nullcontext():
            called(name, k=wrong, s_aux=torch.zeros(2))


CHUNK, BUCKETS, N = 8, 6, 48


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rounds", "look"), [(1, 0), (1, 1), (3, 0), (3, 1)])
def test_hashed_attention_of_reformer(rounds: int, look: int, causal: bool) -> None:
    """In float64: a query that reads itself alone has a score of -100000 there."""
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    torch.manual_seed(rounds)
    config = transformers.ReformerConfig(
        **{"hidden_size": 16, "num_attention_heads": 2, "attention_head_size": 8},
        **{"lsh_attn_chunk_length": CHUNK, "lsh_num_chunks_before": look, "num_hashes": rounds},
        **{"num_buckets": BUCKETS, "is_decoder": causal, "lsh_attention_probs_dropout_prob": 0.0},
    )
    layer: Any = LSHSelfAttention(config, layer_idx=0).double().eval()
    x = torch.randn(2, N, 16).double()
    buckets = torch.randint(0, BUCKETS, (2, 2, rounds, N))
    # theirs are numbered through all rounds
    numbered = buckets + BUCKETS * torch.arange(rounds)[:, None]
    wanted = layer(x, buckets=numbered.flatten(2)).hidden_states
    q, v, wanted = (
        y.unflatten(-1, (2, 8)).transpose(1, 2)
        for y in (layer.query_key(x), layer.value(x), wanted)
    )
    text = f"chunk = {CHUNK}, look = {look}, scale = unit, bucket_mask = false, multiplicity = true"
    past = "causal" if causal else ""
    spec = attnspec.parse(f"attention r {{ input h: buckets {past} attend lsh(h, {text}) }}")
    found = spec.compile()(q, q, v, inputs={"h": buckets})
    # their first chunk of a round reads the last one of the round before, ours at none
    compared = torch.ones(2, 2, N, dtype=torch.bool)
    if look:
        compared = (buckets.argsort(dim=-1, stable=True).argsort(dim=-1) >= CHUNK).all(2)
    assert int(compared.sum()) > N
    # their lengths have 1e-6 added
    torch.testing.assert_close(found[compared], wanted[compared], rtol=1e-4, atol=1e-5)
