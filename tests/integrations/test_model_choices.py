"""Models that choose keys for each query by themselves, against their own eager code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from choosing_models import MODELS
from tiny_models import CAUSAL, TOLERANCE, difference, named, names_restored, transformers

import attnspec
from attnspec.integrations.model_attention import ModelAttention
from attnspec.integrations.transformers import SpecCache, convert


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


def model_of(name: str) -> Any:
    stem, settings = MODELS[name]
    config = getattr(transformers, f"{stem}Config")(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    return getattr(transformers, f"{stem}Model")(config).eval()


def states(model: Any, attention: str) -> list[torch.Tensor]:
    """What a model makes of a text, of one with padding on either side, and of one that it reads in
    pieces."""
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(7))
    padded = torch.ones(3, 2, 13, dtype=torch.long)
    padded[2, 0, 9:] = 0
    if "MiniMax" not in type(model).__name__:
        # its indexer scores padding too, so what it chooses depends on what stands there
        padded[1, 0, :4] = 0
    cache, pieces = transformers.DynamicCache(config=model.config), []
    with torch.no_grad():
        found = [
            model(input_ids=ids, attention_mask=mask).last_hidden_state * mask[..., None]
            for mask in padded
        ]
        for low, high in ((0, 9), (9, 10), (10, 13)):
            step = model(input_ids=ids[:, low:high], past_key_values=cache, use_cache=True)
            pieces.append(step.last_hidden_state)
    return [*found, torch.cat(pieces, 1)]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_chooses_keys_reads_those_of_its_spec(name: str) -> None:
    model = model_of(name)
    wanted = states(model, "eager")
    for found, right in zip(states(model, named(CAUSAL)), wanted, strict=True):
        assert difference(found, right) < TOLERANCE
    if name == "MiniMax M3":
        text = "attention taken { input x: choices(size = 4) causal attend chosen(x) }"
        for found, right in zip(states(model, named(text)), wanted, strict=True):
            assert difference(found, right) < TOLERANCE
    window = states(model, named("attention near { causal attend window(before = 2, after = 0) }"))
    assert difference(window[0], wanted[0]) > 0.01


def pieces(model: Any, cache: Any) -> torch.Tensor:
    """What a model makes of a text that it reads in pieces."""
    ids = torch.randint(3, 61, (2, 13), generator=torch.Generator().manual_seed(7))
    found = []
    with torch.no_grad():
        for low, high in ((0, 9), (9, 10), (10, 13)):
            step = model(input_ids=ids[:, low:high], past_key_values=cache, use_cache=True)
            found.append(step.last_hidden_state)
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", MODELS)
def test_what_a_choice_goes_by_is_kept(name: str) -> None:
    model = model_of(name)
    own = pieces(model, transformers.DynamicCache(config=model.config))
    near = "attention near { causal attend window(before = 2, after = 0) }"
    for text, wanted in ((CAUSAL, own), (near, None)):
        with convert(model, attnspec.parse(text)):
            dynamic = pieces(model, transformers.DynamicCache(config=model.config))
            cache = SpecCache(model)
            found = pieces(model, cache)
            assert type(found) is torch.Tensor
            assert difference(found, dynamic) < TOLERANCE
            assert wanted is None or difference(found, wanted) < TOLERANCE
            # the cache is read, as long as it is there
            assert cache.bytes > 0
            cache.reset()
            assert difference(pieces(model, cache), found) < TOLERANCE


@pytest.mark.parametrize("how", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
def test_a_model_that_chooses_writes_as_with_its_own_cache(how: dict[str, Any]) -> None:
    stem, settings = MODELS["DeepSeek V3.2"]
    config = getattr(transformers, f"{stem}Config")(**{**settings, "eos_token_id": None})
    torch.manual_seed(1)
    model = getattr(transformers, f"{stem}ForCausalLM")(config).eval()
    ids = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(7)).repeat(1, 2)
    given: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, **how}
    model.set_attn_implementation("eager")
    wanted = model.generate(ids, **given)
    with convert(model, attnspec.parse(CAUSAL)):
        found = model.generate(ids, past_key_values=SpecCache(model), **given)
        assert found.tolist() == wanted.tolist()
        assert model.generate(ids, **given).tolist() == wanted.tolist()


# --- the function itself --------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A layer that chooses blocks of 4."""

    index_block_size = 4
    is_causal = True


def called(text: str, **keywords: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, 13, 8, generator=generator) for h in (4, 2, 2))
    attention = ModelAttention(attnspec.parse(text).compile())
    return attention(Layer(), q, k, v, None, **keywords)[0].transpose(1, 2)  # type: ignore[arg-type]


def written(pairs: torch.Tensor, sink: torch.Tensor | None = None) -> torch.Tensor:
    """The same by the formula, for pairs bool [B, H, q, k]."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, 13, 8, generator=generator) for h in (4, 2, 2))
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    scores = (q @ k.mT / 8**0.5).masked_fill(~pairs, -1e30)
    if sink is not None:
        scores = torch.cat([scores, sink[None, :, None, None].expand(2, 4, 13, 1)], -1)
    weights = torch.softmax(scores, -1)[..., :13] * pairs
    return weights @ v


WINDOW = "attention near { causal attend window(before = 6, after = 0) }"


def test_numbers_are_looked_at_from_when_that_is_asked_for() -> None:
    module = attnspec.parse(CAUSAL).compile()
    attention, sink = ModelAttention(module), torch.zeros(4)
    q, k = torch.ones(1, 4, 5, 8), torch.full((1, 2, 5, 8), torch.nan)
    layer: Any = Layer()
    for asked in (False, True, False):
        module.check_finite = asked
        with pytest.raises(ValueError, match="k must be finite") if asked else nullcontext():
            attention(layer, q, k, torch.ones_like(k), None, s_aux=sink)


def test_keys_blocks_and_sinks_mean_what_they_say() -> None:
    generator = torch.Generator().manual_seed(5)
    at = torch.arange(13)
    near = (at <= at[:, None]) & (at >= at[:, None] - 6)
    keys = torch.randint(-1, 13, (2, 13, 5), generator=generator)
    listed = (keys[..., None] == at).any(-2)[:, None].expand(-1, 4, -1, -1)
    torch.testing.assert_close(called(WINDOW, indices=keys.int()), written(near & listed))
    blocks = torch.randint(-1, 4, (2, 2, 13, 2), generator=generator)
    of_blocks = (blocks[..., None] == at // 4).any(-2).repeat_interleave(2, 1)
    torch.testing.assert_close(called(WINDOW, block_indices=blocks), written(near & of_blocks))
    sink = torch.randn(4, generator=generator, requires_grad=True)
    for text in (WINDOW, WINDOW.replace("}", "normalize softmax1 }")):
        found, meant = (
            called(text, indices=keys, s_aux=sink),
            written(near & listed, sink),
        )
        torch.testing.assert_close(found, meant)
        grads = [torch.autograd.grad(x.square().sum(), sink)[0] for x in (found, meant)]
        torch.testing.assert_close(grads[0], grads[1])
    taken = "attention own { input x: choices(size = 4) causal attend chosen(x) | self }"
    with_self = (of_blocks | torch.eye(13, dtype=torch.bool)) & (at <= at[:, None])
    torch.testing.assert_close(called(taken, block_indices=blocks), written(with_self))


@pytest.mark.parametrize(
    ("text", "keywords", "message"),
    [
        ("input x: choices(size = 8) causal attend chosen(x)", "block_indices", "size = 4"),
        ("causal attend linear()", "indices", "has a mechanism"),
        ("causal attend full normalize relu", "s_aux", "normalize relu"),
        ("causal attend linear()", "s_aux", "a mechanism"),
        ("causal attend full", "indices block_indices", "passes both"),
        ("causal attend full", "novelty", "passes `novelty` too"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, keywords: str, message: str) -> None:
    tensors = {
        "indices": torch.zeros(2, 13, 1, dtype=torch.int64),
        "block_indices": torch.zeros(2, 2, 13, 1, dtype=torch.int64),
        "s_aux": torch.zeros(4),
        "novelty": torch.zeros(1),
    }
    given = {name: tensors[name] for name in keywords.split()}
    with pytest.raises(attnspec.AttnSpecError, match=message):
        called(f"attention a {{ {text} }}", **given)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rounds", [1, 3])
def test_hashed_attention_of_reformer(causal: bool, rounds: int) -> None:
    """Without chunks before, which go round from the first to the last there; in float64, as a
    query that reads itself alone has a score of -100000 there, which float32 rounds."""
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    torch.manual_seed(rounds)
    config = transformers.ReformerConfig(
        hidden_size=16,
        num_attention_heads=2,
        attention_head_size=8,
        lsh_attn_chunk_length=8,
        lsh_num_chunks_before=0,
        num_hashes=rounds,
        num_buckets=4,
        is_decoder=causal,
        lsh_attention_probs_dropout_prob=0.0,
    )
    theirs: Any = LSHSelfAttention(config, layer_idx=0).eval().double()
    states, buckets = torch.randn(2, 40, 16).double(), torch.randint(0, 4, (2, 2, rounds, 40))
    # each round has numbers of its own
    numbered = buckets + 4 * torch.arange(rounds)[:, None]
    wanted = theirs(states, buckets=numbered.flatten(2)).hidden_states
    words = "chunk = 8, look = 0, scale = unit, bucket_mask = false, multiplicity = true"
    text = f"input h: buckets {'causal' if causal else ''} attend lsh(h, {words})"
    ours = attnspec.parse(f"attention reformer {{ {text} }}").compile()
    q, v = (
        make(states).unflatten(-1, (2, 8)).transpose(1, 2)
        for make in (theirs.query_key, theirs.value)
    )
    found = ours(q, q, v, inputs={"h": buckets})
    torch.testing.assert_close(found.transpose(1, 2).flatten(2), wanted, rtol=1e-5, atol=1e-5)
