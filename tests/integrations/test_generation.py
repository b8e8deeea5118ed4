"""Models that write: from a cache that keeps what the spec may still read, and from those of
transformers, the rows of the whole pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from model_families import FAMILIES
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
    names_restored,
    padded,
    reference,
    tokens,
    transformers,
)

import attnspec
from attnspec.integrations import spec_cache
from attnspec.integrations.transformers import SpecCache, convert, with_inputs

BY_STEM = {family.stem: family for family in FAMILIES}
MIXED = """attention mixed { heads 4 causal attend window(before = 3, after = 0)
    head 2 { attend strided(stride = 4) } head 3 { attend columns(first(2)) | self } }"""
SPECS = [
    SINKS,
    MIXED,
    "attention drawn { causal attend block(size = 4) | random(keys = 2) & window(radius = 9) }",
    "attention slopes { causal attend window(before = 5, after = 0) score softcap(cap = 2) }",
    "attention linear_ { causal attend linear() }",
    "attention both { causal attend window(before = 3, after = 0) + linear() }",
    "attention chosen_ { causal attend topk(keys = 4) | self }",
    """attention layered { layers 3 causal attend window(before = 3, after = 0)
        layer 1 { attend columns(first(2)) | self } layer 2 { attend full } }""",
]
PARTS = ((0, 5), (5, 6), (6, 13), (13, 14))
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
STATIC = {"cache_implementation": "static", "disable_compile": True}


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


def sparse(text: str) -> Any:
    """A tiny Llama that was given a spec."""
    model = llama("eager")
    convert(model, attnspec.parse(text))
    return model


def steps(
    model: Any,
    ids: torch.Tensor,
    cache: Any,
    parts: Sequence[tuple[int, int]] = PARTS,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """The logits of a text that is read in parts."""
    found = []
    with torch.no_grad():
        for low, high in parts:
            seen = None if mask is None else mask[:, :high]
            out = model(ids[:, low:high], attention_mask=seen, past_key_values=cache)
            found.append(out.logits)
    return torch.cat(found, 1)


# --- what is kept ------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SPECS)
def test_parts_from_a_spec_cache_are_the_whole_pass(text: str) -> None:
    model, ids, mask = sparse(text), tokens(3, 14), padded(14, left=True)
    with warnings.catch_warnings():
        # some count positions from the padding, and say so
        warnings.simplefilter("ignore")
        wanted = hidden(model, ids, mask)
        found = steps(model, ids, SpecCache(model), mask=mask)
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


LAYERS, KEY_HEADS, HEAD_SIZE = 3, 2, 8
POSITION = LAYERS * 2 * KEY_HEADS * HEAD_SIZE * 4
"""Bytes of a position: keys and values of all layers in float32."""


def test_a_window_frees_memory() -> None:
    assert bytes_at(WINDOW, (2, 20, 40)) == [2 * POSITION] + [4 * POSITION] * 2
    assert bytes_at(SINKS, (20, 40)) == [(2 + 2) * POSITION] * 2
    # one after the other they have a place more, that of the next
    assert bytes_at(WINDOW, range(20, 30)) == [4 * POSITION] + [5 * POSITION] * 9
    assert bytes_at(CAUSAL, (20, 40)) == [20 * POSITION, 40 * POSITION]
    dynamic = transformers.DynamicCache()
    steps(llama("eager"), tokens(1, 40), dynamic, [(0, 40)])
    assert sum(x.keys.nbytes + x.values.nbytes for x in dynamic.layers) == 40 * POSITION


def test_sums_take_what_they_take_at_every_length() -> None:
    first, second = bytes_at("attention s { causal attend linear() }", (20, 40))
    assert first == second


def test_heads_that_look_back_without_a_bound_keep_what_they_read_alone() -> None:
    # three of four heads are bounded, and a key head serves two
    short, long = bytes_at(MIXED, (20, 40))
    assert long - short == 20 * POSITION // KEY_HEADS


# --- generate -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["dynamic", "static", "spec", "lookup", "assisted"])
def test_generate_gives_what_the_whole_pass_gives(how: str) -> None:
    model, ids = sparse(MIXED), tokens(1, 6).repeat(1, 2)
    given: dict[str, Any] = dict(GREEDY)
    wanted = model.generate(ids, use_cache=False, **given)
    if how == "static":
        given |= {"cache_implementation": "static", "disable_compile": True}
    elif how != "dynamic":
        given["past_key_values"] = SpecCache(model)
    if how == "lookup":
        given["prompt_lookup_num_tokens"] = 3
    if how == "assisted":
        # one that guesses right now and then
        given["assistant_model"] = sparse(MIXED)
        given["assistant_model"].model.layers[2].mlp.down_proj.weight.data.mul_(0.5)
    assert model.generate(ids, **given).tolist() == wanted.tolist()


def test_several_samples_and_their_beams() -> None:
    model, ids = sparse(MIXED), tokens(2, 9)
    given: dict[str, Any] = {**GREEDY, "num_beams": 2, "num_return_sequences": 2}
    wanted = model.generate(ids, use_cache=False, **given)
    found = model.generate(ids, past_key_values=SpecCache(model), **given)
    assert found.tolist() == wanted.tolist()


def test_run_time_inputs_stand_beside_a_spec_cache() -> None:
    text = """attention marked { input important: tokens(at_most = 2)
        causal attend window(before = 2, after = 0) | columns(important) }"""
    model, ids = llama("eager"), tokens(2, 7)
    done = convert(model, attnspec.parse(text))
    important = torch.zeros(2, 20, dtype=torch.bool)
    important[0, 1] = important[1, 9] = True
    with with_inputs(done, {"important": important}):
        wanted = model.generate(ids, use_cache=False, **GREEDY)
        cache = SpecCache(model)
        assert model.generate(ids, past_key_values=cache, **GREEDY).tolist() == wanted.tolist()
    assert cache.bytes < 6 * 2 * POSITION
    with with_inputs(done, {"important": ~important}):
        message = "promises that at most 2|at most 2"
        with pytest.raises(ValueError, match=message):
            model.generate(ids, past_key_values=SpecCache(model), **GREEDY)


def test_a_cache_says_what_it_holds() -> None:
    model = sparse(
        """attention layered { layers 3 causal attend window(before = 3, after = 0)
        layer 2 { attend full } }"""
    )
    cache = SpecCache(model)
    assert repr(cache) == "SpecCache(0 positions, 0 bytes, by layer 0, 0, 0)"
    steps(model, tokens(1, 20), cache, [(0, 12), (12, 20)])
    # of a window of 4 the next position reads 3 of those before it
    near, far = (n * POSITION // LAYERS for n in (3, 20))
    said = f"{2 * near + far:,} bytes, by layer {near:,}, {near:,}, {far:,}"
    assert near < far
    assert repr(cache) == f"SpecCache(20 positions, {said})"


def test_a_decoder_beside_an_encoder_keeps_its_window() -> None:
    config = transformers.BartConfig(**BY_STEM["Bart"].settings, forced_eos_token_id=None)
    torch.manual_seed(1)
    model = transformers.BartForConditionalGeneration(config).eval()
    ids = tokens(2, 9)
    convert(model, encoder=attnspec.parse(FULL), decoder=attnspec.parse(WINDOW))
    given: dict[str, Any] = {**GREEDY, "eos_token_id": None}
    wanted = model.generate(ids, use_cache=False, **given)
    assert model.generate(ids, **given).tolist() == wanted.tolist()
    own = SpecCache(model.get_decoder())
    both = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
    assert model.generate(ids, past_key_values=both, **given).tolist() == wanted.tolist()
    assert own.bytes == 2 * 2 * 2 * (4 + 1) * 32 * 4  # samples, layers, keys and values, positions


def gpt_oss() -> Any:
    """A tiny GPT-OSS, whose heads have sinks."""
    settings = {**BY_STEM["GptOss"].settings, "eos_token_id": None}
    torch.manual_seed(1)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings)).eval()
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


@pytest.mark.parametrize(
    "body",
    [
        "attend window(before = 3, after = 0)",
        "attend window(before = 2, after = 0) | columns(first(2)) normalize softmax1",
        "heads 4 attend block(size = 4) head 1 { attend strided(stride = 3) }",
        "heads 4 attend window(before = 5, after = 0) score bias(buckets = 4, max_distance = 6)",
        "attend topk(keys = 3) | self",
    ],
)
def test_sinks_stand_beside_what_is_kept(body: str) -> None:
    model = gpt_oss()
    done = convert(model, attnspec.parse(f"attention a {{ causal {body} }}"))
    learned = [x for name, x in model.named_parameters() if "attnspec" in name]
    assert len(learned) == ("bias" in body)
    for parameter in learned:
        torch.nn.init.normal_(parameter)
    ids, mask = tokens(3, 14), padded(14, left=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = hidden(model, ids, mask)
        found = steps(model, ids, SpecCache(model), [*PARTS[:-1], (13, 14)], mask)
        assert difference(found, wanted, mask) < TOLERANCE
        # the sinks are felt
        for layer in model.model.layers:
            layer.self_attn.sinks.data.sub_(2.0)
        assert difference(hidden(model, ids, mask), wanted, mask) > 0.01
        one = tokens(1, 9)
        wanted = model.generate(one, use_cache=False, **GREEDY)
        for given in ({}, {"past_key_values": SpecCache(model)}):
            assert model.generate(one, **given, **GREEDY).tolist() == wanted.tolist()
    done.undo()


GROWING: dict[str, tuple[str, Any]] = {
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


@pytest.mark.parametrize("kind", GROWING)
def test_run_time_inputs_grow_with_what_is_written(kind: str) -> None:
    body, values = GROWING[kind]
    model, ids = llama("eager"), tokens(2, 7)
    done = convert(model, attnspec.parse(f"attention a {{ {body} }}"))
    with with_inputs(done, {"x": values}):
        wanted = model.generate(ids, use_cache=False, **GREEDY)
        for given in ({}, STATIC, {"past_key_values": SpecCache(model)}):
            assert model.generate(ids, **given, **GREEDY).tolist() == wanted.tolist()
        with pytest.raises(attnspec.AttnSpecError, match=r"21 positions, got 20"):
            model.generate(ids, **{**GREEDY, "max_new_tokens": 15})
    # the beams of a sample have its inputs
    beams: dict[str, Any] = {**GREEDY, "num_beams": 2}
    with with_inputs(done, {"x": values.repeat_interleave(2, 0)}):
        wanted = model.generate(ids, use_cache=False, **beams)
        found = model.generate(ids, past_key_values=SpecCache(model), **beams)
        assert found.tolist() == wanted.tolist()


def joined(stem: str, cross: str, marks: str = "") -> tuple[Any, Any]:
    """A tiny encoder and decoder, with a spec for the decoder's own sequence and one between."""
    kind = f"{stem}ForConditionalGeneration"
    settings = {**BY_STEM[stem].settings, "forced_eos_token_id": None}
    torch.manual_seed(1)
    model = getattr(transformers, kind)(getattr(transformers, f"{stem}Config")(**settings)).eval()
    score = "score bias(buckets = 32, max_distance = 128)" if stem == "T5" else ""
    graph = "window(before = 2, after = 0)" + f" | columns({marks})" * bool(marks)
    inputs = f"input {marks}: tokens" * bool(marks)
    own = f"attention own {{ heads 4 {inputs} causal attend {graph} {score} }}"
    specs: dict[str, Any] = {"decoder": attnspec.parse(own), "cross": attnspec.parse(cross)}
    return model, convert(model, **specs)


@pytest.mark.parametrize("stem", ["Bart", "T5"])
@pytest.mark.parametrize(
    "body", ["where(k - 2 * q <= 3 and 2 * q - k <= 3)", "columns(keep) | window(radius = 1)"]
)
def test_a_decoder_writes_by_what_joins_it_to_an_encoder(stem: str, body: str) -> None:
    model, done = joined(stem, f"attention c {{ cross input keep: tokens attend {body} }}")
    ids, mask = tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    given: dict[str, Any] = {**GREEDY, "eos_token_id": None, "attention_mask": mask}
    keep = torch.zeros(2, 12, dtype=torch.bool)
    keep[:, 4] = keep[0, 9] = True
    both = transformers.EncoderDecoderCache(
        SpecCache(model.get_decoder()), transformers.DynamicCache()
    )
    with with_inputs(done, {"keep": keep}):
        wanted = model.generate(ids, use_cache=False, **given)
        for more in ({}, STATIC, {"past_key_values": both}):
            assert model.generate(ids, **more, **given).tolist() == wanted.tolist()
    given["num_beams"] = 2
    with with_inputs(done, {"keep": keep.repeat_interleave(2, 0)}):
        wanted = model.generate(ids, use_cache=False, **given)
        assert model.generate(ids, **given).tolist() == wanted.tolist()


def test_inputs_of_an_encoder_are_as_long_as_that_alone() -> None:
    model, done = joined(
        "Bart", "attention c { cross input keep: tokens attend columns(keep) }", "a"
    )
    ids, rest = tokens(2, 3), {**GREEDY, "eos_token_id": None}
    keep, marked = torch.ones(2, 3, dtype=torch.bool), torch.arange(8).expand(2, 8) % 4 == 0
    with with_inputs(done, {"keep": keep, "a": marked}):
        wanted = model.generate(ids, use_cache=False, **rest)
        assert model.generate(ids, **rest).tolist() == wanted.tolist()


WRONG = (torch.tensor(3), torch.zeros(3), torch.zeros(2, 2, 2, 2, 2), [[3]], None)


@pytest.mark.parametrize("given", WRONG)
@pytest.mark.parametrize("kind", GROWING)
def test_what_is_no_input_is_refused_as_everywhere(kind: str, given: Any) -> None:
    model, ids = llama("eager"), tokens(2, 7)
    done = convert(model, attnspec.parse(f"attention a {{ {GROWING[kind][0]} }}"))
    with with_inputs(done, {"x": given}), pytest.raises((TypeError, ValueError), match="input `x`"):
        model.generate(ids, **GREEDY)
    with pytest.raises((TypeError, ValueError), match="input `x`"):
        model(ids, attnspec_inputs={"x": given}, past_key_values=SpecCache(model))


def test_what_reads_how_much_is_written_does_not_go_on() -> None:
    model, _ = joined("Bart", "attention c { cross attend where(k * m <= 4 * n + q * n) }")
    with pytest.raises(ValueError, match="reads m, the number of all queries"):
        model.generate(tokens(2, 12), **GREEDY)


def test_a_mask_of_pairs_does_not_say_where_a_decoder_is() -> None:
    model, done = joined("Bart", "attention c { cross attend window(radius = 2) }")
    done.undo()
    convert(model, cross=attnspec.parse("attention c { cross attend window(radius = 2) }"))
    encoded = model.get_encoder()(tokens(2, 12))
    cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    given = {"encoder_outputs": encoded, "past_key_values": cache}
    model(decoder_input_ids=tokens(2, 3), **given)
    mask = torch.zeros(2, 1, 1, 4)
    with pytest.raises(attnspec.AttnSpecError, match="does not say where the queries of `c`"):
        model(decoder_input_ids=tokens(2, 1), decoder_attention_mask=mask, **given)


# --- sliding caches of transformers -------------------------------------------------------------


def sliding(window: int) -> Any:
    settings = {**BY_STEM["Mistral"].settings, "num_hidden_layers": 3, "sliding_window": window}
    return transformers.DynamicCache(config=transformers.MistralConfig(**settings))


@pytest.mark.parametrize("score", ["", "score softcap(cap = 2)"])
def test_a_cache_that_begins_later_is_enough_for_a_window(score: str) -> None:
    # a window of w positions keeps the w - 1 before the query
    model = sparse(f"attention w {{ causal attend window(before = 3, after = 0) {score} }}")
    ids, mask = tokens(3, 14), padded(14, left=True)
    found = steps(model, ids, sliding(4), mask=mask)
    assert difference(found, hidden(model, ids, mask), mask) < TOLERANCE


@pytest.mark.parametrize(
    "graph",
    [
        "window(before = 4, after = 0)",
        "block(size = 3)",
        "window(before = 2, after = 0) | columns(first(1))",
        "strided(stride = 4)",
        "linear()",
    ],
)
def test_a_cache_that_has_lost_keys_is_refused(graph: str) -> None:
    model, ids = sparse(f"attention w {{ causal attend {graph} }}"), tokens(1, 14)
    with pytest.raises(attnspec.AttnSpecError, match=r"or `SpecCache\(model\)`, which keeps"):
        steps(model, ids, sliding(4))
    for cache in (SpecCache(model), transformers.DynamicCache()):
        assert difference(steps(model, ids, cache), hidden(model, ids)) < TOLERANCE


def test_windows_of_a_model_that_was_converted_leave_no_sliding_cache() -> None:
    settings = {**BY_STEM["Mistral"].settings, "eos_token_id": None}
    torch.manual_seed(1)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**settings)).eval()
    with convert(model, attnspec.parse(SINKS.replace("before = 2", "before = 6"))):
        ids = tokens(1, 9)
        wanted = model.generate(ids, use_cache=False, **GREEDY)
        assert model.generate(ids, **GREEDY).tolist() == wanted.tolist()
    assert model.config.sliding_window == 4


WINDOWED = ("Gemma2", "Gemma3Text", "GptOss", "Mistral", "Phi3", "Qwen2")
"""Families with sliding layers in their configs, or that may have them."""


def windowed(stem: str) -> Any:
    """A tiny model that writes, all of its layers but the last with windows of 4."""
    settings = {**BY_STEM[stem].settings, "eos_token_id": None, "num_hidden_layers": 3}
    config = getattr(transformers, f"{stem}Config")(**settings, **_windows(stem))
    torch.manual_seed(1)
    name = stem.removesuffix("Text")
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def _windows(stem: str) -> dict[str, Any]:
    if stem in ("Mistral", "Phi3"):
        return {"sliding_window": 4} if stem == "Phi3" else {}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    own = {"sliding_window": 4, "use_sliding_window": True}
    return {"layer_types": kinds} | (own if stem == "Qwen2" else {})


@pytest.mark.parametrize("stem", WINDOWED)
def test_what_a_converted_model_keeps_does_not_slide(stem: str) -> None:
    # further back than the model's own windows, from a position, and to the first ones
    model, ids = windowed(stem), tokens(2, 9)
    before = model.generate(ids, **GREEDY)
    score = "score softcap(cap = 2)" if stem == "Gemma2" else ""
    graph = "window(before = 5, after = 0) | block(size = 8) | columns(first(1))"
    with convert(model, attnspec.parse(f"attention a {{ causal attend {graph} {score} }}")):
        wanted = model.generate(ids, use_cache=False, **GREEDY)
        for given in ({}, STATIC, {"past_key_values": SpecCache(model)}):
            assert model.generate(ids, **given, **GREEDY).tolist() == wanted.tolist()
        beams: dict[str, Any] = {**GREEDY, "num_beams": 2}
        wanted = model.generate(ids, use_cache=False, **beams)
        assert model.generate(ids, **beams).tolist() == wanted.tolist()
    assert model.generate(ids, **GREEDY).tolist() == before.tolist()
    # one that slides all the same, and is too short
    own = transformers.DynamicCache(config=model.config)
    with (
        convert(model, attnspec.parse(f"attention a {{ causal attend block(size = 8) {score} }}")),
        pytest.raises(attnspec.AttnSpecError, match="a cache that keeps what `a` reads is needed"),
    ):
        model.generate(ids, past_key_values=own, **GREEDY)


@pytest.mark.parametrize("how", ["assisted", "lookup"])
def test_guesses_are_taken_back(how: str) -> None:
    model, ids = windowed("Gemma3Text"), tokens(1, 6).repeat(1, 2)
    given: dict[str, Any] = {"prompt_lookup_num_tokens": 3} if how == "lookup" else {}
    with convert(model, attnspec.parse(WINDOW)):
        wanted = model.generate(ids, use_cache=False, **GREEDY)
        if how == "assisted":
            given["assistant_model"] = windowed("Gemma3Text")
            convert(given["assistant_model"], attnspec.parse(SINKS))
        assert model.generate(ids, **given, **GREEDY).tolist() == wanted.tolist()


@pytest.mark.skipif(
    torch.__version__ < "2.11",  # type: ignore[operator]
    reason="the cache of transformers rounds to NaN in torch 2.9, with its own attention too",
)
def test_keys_of_fewer_bits_are_read_as_they_are() -> None:
    # the first part is exact, later ones meet what is kept of it
    def read(model: Any) -> torch.Tensor:
        return steps(model, tokens(2, 14), transformers.QuantizedCache("fp8", model.config))

    spec = attnspec.parse(WINDOW)
    defined = llama(reference(lambda n, layer: spec.mask(n)))
    found = read(sparse(WINDOW))
    assert difference(found, read(defined)) < TOLERANCE
    assert difference(found, hidden(defined, tokens(2, 14))) > 1e-3


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "spec"])
def test_queries_that_are_sorted_by_themselves_do_not_go_on(cache: str) -> None:
    # as in a call with the last query alone, which has other rows
    text = (
        "attention s { causal attend lsh(buckets = 4, chunk = 4, cut = bucket, share_qk = false) }"
    )
    model = sparse(text)
    given = {"past_key_values": SpecCache(model)} if cache == "spec" else {}
    with pytest.raises(ValueError, match="puts the queries of a call into chunks of their own"):
        model.generate(tokens(1, 9), **given, **GREEDY)


def test_a_cache_is_for_a_model_whose_layers_use_a_spec() -> None:
    with pytest.raises(attnspec.AttnSpecError, match=r"`model.layers.0.self_attn` does not: dense"):
        SpecCache(llama("eager"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("attention a { attend window(before = 3, after = 0) }", "is not causal"),
        ("attention a { causal attend window(before = isqrt(n), after = 0) }", "at every n > q"),
        ("attention a { causal attend columns(last(2)) | self }", r"`columns\(last\(2\)\)`"),
    ],
)
def test_rows_that_are_not_those_of_the_whole_pass(text: str, message: str) -> None:
    model = sparse(text)
    with pytest.raises(ValueError, match=message):
        model.generate(tokens(1, 5), past_key_values=SpecCache(model), **GREEDY)


def test_dropout_is_refused() -> None:
    model = llama("eager", attention_dropout=0.5)
    convert(model, attnspec.parse(WINDOW))
    ids = tokens(1, 5)
    model.generate(ids, past_key_values=SpecCache(model), **GREEDY)
    with pytest.raises(attnspec.AttnSpecError, match="knows no dropout"):
        steps(model.train(), ids, SpecCache(model), [(0, 5)])


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


def test_an_encoder_has_nothing_to_go_on_from() -> None:
    model = bert("eager")
    convert(model, attnspec.parse(FULL))
    cache = SpecCache(model)
    assert cache.bytes == 0


@pytest.mark.parametrize("name", ["update_index", "update_indexer"])
def test_layers_that_choose_among_positions_are_left_as_they_are(name: str) -> None:
    layer: Any = type("Layer", (), {name: None})()
    assert spec_cache._chooses(layer)
    assert not spec_cache._chooses(spec_cache.SpecLayer())
    assert not spec_cache._chooses(None)
