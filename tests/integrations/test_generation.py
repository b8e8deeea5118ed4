"""Models that write: from a cache that keeps what the spec may still read, and from those of
transformers, the rows of the whole pass. Each family with each cache: test_families.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from model_families import BY_STEM
from sweeps import checkered, few
from tiny_models import (
    CAUSAL,
    FULL,
    SINKS,
    TOLERANCE,
    WINDOW,
    bert,
    difference,
    hidden,
    llama,
    padded,
    tiny,
    tokens,
    transformers,
)
from torch import Tensor

import attnspec
from attnspec.integrations.transformers import SpecCache, convert, with_inputs

MIXED = """attention mixed { heads 4 causal attend window(before = 3, after = 0)
    head 2 { attend strided(stride = 4) } head 3 { attend columns(first(2)) | self } }"""
LAYERED = """attention layered { layers 3 causal attend window(before = 3, after = 0)
    layer 1 { attend columns(first(2)) | self } layer 2 { attend full } }"""
SPECS = [
    SINKS,
    MIXED,
    LAYERED,
    "attention drawn { causal attend block(size = 4) | random(keys = 2) & window(radius = 9) }",
    "attention slopes { causal attend window(before = 5, after = 0) score softcap(cap = 2) }",
    "attention linear_ { causal attend linear() }",
    "attention both { causal attend window(before = 3, after = 0) + linear() }",
    "attention chosen_ { causal attend topk(keys = 4) | self }",
    "attention a { causal attend self | random_blocks(size = 3, blocks = 2, seed = 5) }",
    "attention a { causal attend window(before = min(n, 99), after = 0) }",
]
PARTS = ((0, 5), (5, 6), (6, 13), (13, 14))
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
STATIC = {"cache_implementation": "static", "disable_compile": True}


def sparse(text: str) -> Any:
    """A tiny Llama that was given a spec."""
    model = llama("eager")
    convert(model, attnspec.parse(text))
    return model


def steps(
    model: Any,
    ids: Tensor,
    cache: Any,
    parts: Sequence[tuple[int, int]] = PARTS,
    mask: Tensor | None = None,
) -> Tensor:
    """The logits of a text that is read in parts."""
    found = []
    with torch.no_grad():
        for low, high in parts:
            seen = None if mask is None else mask[:, :high]
            out = model(ids[:, low:high], attention_mask=seen, past_key_values=cache)
            found.append(out.logits)
    return torch.cat(found, 1)


def require_written(model: Any, ids: Any, *caches: dict[str, Any], **given: Any) -> None:
    """Each cache gives what the whole pass gives."""
    wanted = model.generate(ids, use_cache=False, **given)
    for cache in caches:
        assert model.generate(ids, **cache, **given).tolist() == wanted.tolist(), cache


@pytest.mark.filterwarnings("ignore:.*padding on the left shifts the positions of all tokens")
@pytest.mark.parametrize("text", few(SPECS))
def test_parts_from_a_cache_are_the_whole_pass(text: str) -> None:
    model, ids, mask = sparse(text), tokens(3, 14), padded(14, left=True)
    wanted = hidden(model, ids, mask)
    static = transformers.StaticCache(config=model.config, max_cache_len=17)
    # one that keeps what may still be read asks for a number
    caches = [SpecCache(model)] if "min(n" not in text else []
    for cache in (*caches, transformers.DynamicCache(), static):
        found = steps(model, ids, cache, mask=mask)
        assert difference(found, wanted, mask) < TOLERANCE
    # the cache is read: without it the last token is another
    assert difference(found[:1, -1:], hidden(model, ids[:1, -1:])) > 0.01


def bytes_at(text: str, lengths: Sequence[int]) -> list[int]:
    """What a cache holds after so many positions of a text."""
    model, ids, found = sparse(text), tokens(1, max(lengths)), []
    cache = SpecCache(model)
    for low, high in zip((0, *lengths), lengths, strict=False):
        steps(model, ids, cache, [(low, high)])
        found.append(cache.bytes)
    return found


LAYERS, KEY_HEADS, HEAD_SIZE = 3, 2, 12
POSITION = LAYERS * 2 * KEY_HEADS * HEAD_SIZE * 4
"""Bytes of a position: keys and values of all layers in float32."""


def test_windows_and_sums_free_memory() -> None:
    assert bytes_at(WINDOW, (2, 20, 40)) == [2 * POSITION] + [4 * POSITION] * 2
    assert bytes_at(SINKS, (20, 40)) == [(2 + 2) * POSITION] * 2
    # one after the other they have a place more, that of the next
    assert bytes_at(WINDOW, range(20, 30)) == [4 * POSITION] + [5 * POSITION] * 9
    assert bytes_at(CAUSAL, (20, 40)) == [20 * POSITION, 40 * POSITION]
    dynamic = transformers.DynamicCache()
    steps(llama("eager"), tokens(1, 40), dynamic, [(0, 40)])
    assert sum(x.keys.nbytes + x.values.nbytes for x in dynamic.layers) == 40 * POSITION
    first, second = bytes_at("attention s { causal attend linear() }", (20, 40))
    assert first == second
    # three of four heads are bounded, and a key head serves two
    short, long = bytes_at(MIXED, (20, 40))
    assert long - short == 20 * POSITION // KEY_HEADS


def test_a_cache_says_what_it_holds() -> None:
    text = LAYERED.replace("layer 1 { attend columns(first(2)) | self }", "")
    cache = SpecCache(model := sparse(text))
    assert repr(cache) == "SpecCache(0 positions, 0 bytes, by layer 0, 0, 0)"
    steps(model, tokens(1, 20), cache, [(0, 12), (12, 20)])
    # of a window of 4 the next position reads 3 of those before it
    near, far = (n * POSITION // LAYERS for n in (3, 20))
    said = f"{2 * near + far:,} bytes, by layer {near:,}, {near:,}, {far:,}"
    assert repr(cache) == f"SpecCache(20 positions, {said})"
    encoder = bert("eager")
    convert(encoder, attnspec.parse(FULL))
    assert SpecCache(encoder).bytes == 0


def test_samples_beams_and_guesses() -> None:
    model, ids = sparse(MIXED), tokens(1, 6).repeat(1, 2)
    # one that guesses right now and then
    other = sparse(MIXED)
    other.model.layers[2].mlp.down_proj.weight.data.mul_(0.5)
    ways: Any = ({}, {"prompt_lookup_num_tokens": 3}, {"assistant_model": other})
    require_written(
        model, ids, *({"past_key_values": SpecCache(model), **x} for x in ways), **GREEDY
    )
    more = {**GREEDY, "num_beams": 2, "num_return_sequences": 2}
    require_written(model, tokens(2, 9), {"past_key_values": SpecCache(model)}, **more)
    # of a model with windows of its own guesses are taken back, too
    pair = [
        BY_STEM["Gemma3Text"].build("eager", "ForCausalLM", eos_token_id=None) for _ in range(2)
    ]
    for each, text in zip(pair, (WINDOW, SINKS), strict=True):
        convert(each, attnspec.parse(text))
    require_written(
        pair[0], ids, {"prompt_lookup_num_tokens": 3}, {"assistant_model": pair[1]}, **GREEDY
    )


@pytest.mark.filterwarnings("ignore:.*padding on the left shifts the positions of all tokens")
@pytest.mark.parametrize(
    "body",
    [
        "attend window(before = 2, after = 0) | columns(first(2)) normalize softmax1",
        "heads 4 attend block(size = 4) head 1 { attend strided(stride = 3) }",
        "heads 4 attend window(before = 5, after = 0) score bias(buckets = 4, max_distance = 6)",
        "attend topk(keys = 3) | self",
    ],
)
def test_sinks_of_a_model_stand_beside_what_is_kept(body: str) -> None:
    model = BY_STEM["GptOss"].build("eager", "ForCausalLM", eos_token_id=None)
    convert(model, attnspec.parse(f"attention a {{ causal {body} }}"))
    for name, parameter in model.named_parameters():
        if "attnspec" in name or "sinks" in name:
            torch.nn.init.normal_(parameter)
    ids, mask = tokens(3, 14), padded(14, left=True)
    wanted = hidden(model, ids, mask)
    assert difference(steps(model, ids, SpecCache(model), mask=mask), wanted, mask) < TOLERANCE
    require_written(model, tokens(1, 9), {}, {"past_key_values": SpecCache(model)}, **GREEDY)


GROWING: dict[str, tuple[str, Any]] = {
    "tokens": (
        "input x: tokens(at_most = 4) causal attend window(before = 2, after = 0) | columns(x)",
        torch.arange(20).expand(2, -1) % 7 == 1,
    ),
    "documents": (
        "input x: ids causal attend window(before = 5, after = 0) & same(x)",
        torch.arange(20).expand(2, -1) // 4,
    ),
    "numbers": (
        "input x: numbers causal attend where(x(q) - x(k) <= 3)",
        torch.arange(20).expand(2, -1) * 1.5,
    ),
    "choices": (
        "input x: choices causal attend chosen(x) | self",
        torch.arange(120).view(2, 1, 20, 3) % 7 - 1,
    ),
    "buckets": (
        "input x: buckets causal attend self | lsh(x, chunk = 4, cut = bucket, share_qk = false)",
        torch.arange(80).view(2, 1, 2, 20) % 3,
    ),
}


@pytest.mark.parametrize("kind", few(GROWING))
def test_run_time_inputs_grow_with_what_is_written(kind: str) -> None:
    body, values = GROWING[kind]
    model, ids = llama("eager"), tokens(2, 7)
    done = convert(model, attnspec.parse(f"attention a {{ {body} }}"))
    with with_inputs(done, {"x": values}):
        require_written(model, ids, {}, STATIC, {"past_key_values": SpecCache(model)}, **GREEDY)
        with pytest.raises(attnspec.AttnSpecError, match=r"21 positions, got 20"):
            model.generate(ids, **{**GREEDY, "max_new_tokens": 15})
    # the beams of a sample have its inputs
    with with_inputs(done, {"x": values.repeat_interleave(2, 0)}):
        cache = {"past_key_values": SpecCache(model)}
        require_written(model, ids, cache, **{**GREEDY, "num_beams": 2})
    for wrong in (torch.tensor(3), torch.zeros(3), torch.zeros(2, 2, 2, 2, 2), [[3]], None):
        for more in ({}, {"past_key_values": SpecCache(model)}):
            with (
                with_inputs(done, {"x": wrong}),  # type: ignore[dict-item]
                pytest.raises((TypeError, ValueError), match="input `x`"),
            ):
                model.generate(ids, **GREEDY, **more)


def test_marks_beyond_what_was_promised_are_refused() -> None:
    model, ids = llama("eager"), tokens(2, 7)
    done = convert(model, attnspec.parse(f"attention a {{ {GROWING['tokens'][0]} }}"))
    given, more = {"x": torch.ones(2, 20, dtype=torch.bool)}, {"past_key_values": SpecCache(model)}
    with with_inputs(done, given), pytest.raises(ValueError, match="at most 4"):
        model.generate(ids, **more, **GREEDY)


def joined(stem: str, cross: str, marks: str = "") -> tuple[Any, Any]:
    """A tiny encoder and decoder, with a spec for the decoder's own sequence and one between."""
    own = {**BY_STEM[stem].settings, "forced_eos_token_id": None, "eos_token_id": None}
    model = tiny(stem, "ForConditionalGeneration", **own)
    score = "score bias(buckets = 32, max_distance = 128)" if stem == "T5" else ""
    graph = "window(before = 2, after = 0)" + f" | columns({marks})" * bool(marks)
    inputs = f"input {marks}: tokens" * bool(marks)
    text = f"attention own {{ heads 4 {inputs} causal attend {graph} {score} }}"
    specs: dict[str, Any] = {"decoder": attnspec.parse(text), "cross": attnspec.parse(cross)}
    return model, convert(model, **specs)


CROSSED = "where(k - 2 * q <= 3 and 2 * q - k <= 3)", "columns(keep) | window(radius = 1)"


@pytest.mark.parametrize(("stem", "body"), checkered(["Bart", "T5"], CROSSED))
def test_a_decoder_writes_by_what_joins_it_to_an_encoder(stem: str, body: str) -> None:
    model, done = joined(stem, f"attention c {{ cross input keep: tokens attend {body} }}")
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    given: dict[str, Any] = {**GREEDY, "attention_mask": mask}
    keep = torch.zeros(2, 12, dtype=torch.bool)
    keep[:, 4] = keep[0, 9] = True
    own: Any = SpecCache(model.get_decoder())
    both = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
    with with_inputs(done, {"keep": keep}):
        require_written(model, ids, {}, STATIC, {"past_key_values": both}, **given)
    # samples, layers, keys and values, the positions of a window and one to come
    assert own.bytes == 2 * 2 * 2 * (2 + 1) * 48 * 4
    with with_inputs(done, {"keep": keep.repeat_interleave(2, 0)}):
        require_written(model, ids, {}, **given, num_beams=2)


def test_inputs_of_a_cross_spec_have_the_length_of_the_encoder() -> None:
    cross = "attention c { cross input keep: tokens attend columns(keep) }"
    model, done = joined("Bart", cross, "a")
    keep, marked = torch.ones(2, 3, dtype=torch.bool), torch.arange(8).expand(2, 8) % 4 == 0
    with with_inputs(done, {"keep": keep, "a": marked}):
        require_written(model, tokens(2, 3), {}, **GREEDY)


def test_a_mask_of_pairs_does_not_say_where_a_decoder_is() -> None:
    model = tiny("Bart", "ForConditionalGeneration")
    convert(model, cross=attnspec.parse("attention c { cross attend window(radius = 2) }"))
    cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    given = {"encoder_outputs": model.get_encoder()(tokens(2, 12)), "past_key_values": cache}
    model(decoder_input_ids=tokens(2, 3), **given)
    mask = torch.zeros(2, 1, 1, 4)
    with pytest.raises(attnspec.AttnSpecError, match="does not say where the queries of `c`"):
        model(decoder_input_ids=tokens(2, 1), decoder_attention_mask=mask, **given)


def sliding() -> Any:
    config = BY_STEM["Mistral"].build(num_hidden_layers=3).config
    return transformers.DynamicCache(config=config)


@pytest.mark.parametrize("rest", ["", "score softcap(cap = 2)", "& same(x)"])
def test_a_cache_that_begins_later_is_enough_for_a_window(rest: str) -> None:
    # a window of w positions keeps the w - 1 before the query
    inputs = "input x: ids" * rest.startswith("&")
    spec = f"attention w {{ {inputs} causal attend window(before = 3, after = 0) {rest} }}"
    ids, mask, model = tokens(3, 14), padded(14, left=True), llama("eager")
    with with_inputs(
        convert(model, attnspec.parse(spec)), {"x": torch.arange(14).expand(3, -1) // 5}
    ):
        found = steps(model, ids, sliding(), mask=mask)
        assert difference(found, hidden(model, ids, mask), mask) < TOLERANCE


@pytest.mark.parametrize(
    "graph", ["window(before = 4, after = 0)", "block(size = 3)", "strided(stride = 4)", "linear()"]
)
def test_a_cache_that_has_lost_keys_is_refused(graph: str) -> None:
    model, ids = sparse(f"attention w {{ causal attend {graph} }}"), tokens(1, 14)
    words = r"pass `past_key_values = DynamicCache\(\)`.* or `SpecCache\(model\)`, which keeps"
    with pytest.raises(attnspec.AttnSpecError, match=words):
        steps(model, ids, sliding())


@pytest.mark.skipif(
    torch.__version__ < "2.11",
    reason="the cache of transformers rounds to NaN in torch 2.9, with its own attention too",
)
def test_keys_of_fewer_bits_are_read_as_they_are() -> None:
    # the first part is exact, later ones meet what is kept of it
    model, ids, spec = sparse(WINDOW), tokens(2, 14), attnspec.parse(WINDOW)
    mask = torch.where(torch.from_numpy(spec.mask(14)), 0.0, -torch.inf)[None, None]
    dense, cache = llama("eager"), transformers.QuantizedCache("fp8", model.config)
    found, meant = steps(model, ids, cache), []
    cache = transformers.QuantizedCache("fp8", model.config)
    with torch.no_grad():
        for low, high in PARTS:
            part = dense(ids[:, low:high], mask[:, :, low:high, :high], past_key_values=cache)
            meant.append(part.logits)
    assert difference(found, torch.cat(meant, 1)) < TOLERANCE
    assert difference(found, hidden(model, ids)) > 1e-3


def test_a_cache_is_for_a_model_whose_layers_use_a_spec_and_drop_nothing() -> None:
    with pytest.raises(attnspec.AttnSpecError, match=r"got `model.layers.0.self_attn`: dense"):
        SpecCache(llama("eager"))
    model = llama("eager", attention_dropout=0.5)
    convert(model, attnspec.parse(WINDOW))
    model.generate(tokens(1, 5), past_key_values=SpecCache(model), **GREEDY)
    with pytest.raises(attnspec.AttnSpecError, match="which applies no dropout"):
        steps(model.train(), tokens(1, 5), SpecCache(model), [(0, 5)])


def test_only_what_was_recorded_is_taken_back() -> None:
    model, ids = sparse(SINKS), tokens(2, 14)
    cache: Any = SpecCache(model)
    wanted = hidden(model, ids)
    steps(model, ids, cache, [(0, 9)])
    with pytest.raises(RuntimeError, match="at most the 0 positions"):
        cache.crop(-1)
    cache.activate_past_recording()
    steps(model, tokens(2, 20), cache, [(9, 11), (11, 15)])
    with pytest.raises(RuntimeError, match="`crop` must come before"):
        cache.reorder_cache(torch.tensor([1, 0]))
    with pytest.raises(RuntimeError, match="at most the 6 positions"):
        cache.crop(-7)
    cache.crop(-6)
    assert cache.get_seq_length() == 9
    assert difference(steps(model, ids, cache, [(9, 14)]), wanted[:, 9:]) < TOLERANCE
    # some of a part stand
    cache.crop(-2)
    assert difference(steps(model, ids, cache, [(12, 14)]), wanted[:, 12:]) < TOLERANCE


@pytest.mark.parametrize("text", [MIXED, "attention l { causal attend linear() }"])
def test_samples_are_chosen_and_repeated(text: str) -> None:
    model, ids = sparse(text), tokens(3, 12)
    wanted = hidden(model, ids)
    cache: Any = SpecCache(model)
    assert cache.batch_size == -1
    steps(model, ids, cache, [(0, 9)])
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    order = [2, 2, 0, 0]
    found = steps(model, ids[order], cache, [(9, 12)])
    assert difference(found, wanted[order, 9:]) < TOLERANCE
    cache.reset()
    assert cache.bytes == 0
    assert difference(steps(model, ids, cache, [(0, 7), (7, 12)]), wanted) < TOLERANCE
