"""A spec under a name, as `attn_implementation`: what it computes, what it refuses, and that the
way out that a refusal names is one."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from model_families import BY_STEM, settings_of
from tiny_models import (
    CAUSAL,
    FULL,
    LONGFORMER,
    TOLERANCE,
    WINDOW,
    bert,
    called,
    difference,
    hidden,
    llama,
    named,
    padded,
    tiny,
    tokens,
    transformers,
)

import attnspec
from attnspec.integrations.transformers import SpecCache, register, with_inputs
from attnspec.testing import assert_attends

GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def refused(call: Any, *arguments: Any, **settings: Any) -> str:
    with pytest.raises(attnspec.AttnSpecError) as caught:
        call(*arguments, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "inputs"),
    [
        ("attend window(radius = 3) | global(first(1))", {}),
        ("layers 3 attend full layer 0 { attend self } layer 2 { attend window(radius = 2) }", {}),
        ("heads 4 attend full head 1..2 { attend window(radius = 1) }", {}),
        (
            "input m: tokens attend window(radius = 1) | global(m)",
            {"m": torch.arange(12).expand(3, -1) == 4},
        ),
    ],
)
def test_each_layer_and_head_reads_its_pairs(text: str, inputs: dict[str, Any]) -> None:
    text = f"attention a {{ {text} }}"
    call = {"input_ids": tokens(3, 12), "attention_mask": padded(12, left=False)}
    given = {"attnspec_inputs": inputs} if inputs else {}
    spec, model = attnspec.parse(text), bert(named(text))
    assert_attends(model, spec, inputs=inputs, call={**call, **given})


@pytest.mark.parametrize("graph", ["window(before = 3, after = 0)", "causal - self | self"])
def test_a_decoder_takes_what_stays_in_the_past_without_saying_causal(graph: str) -> None:
    text = f"attention past_only {{ attend {graph} }}"
    assert_attends(llama(named(text)), attnspec.parse(text), tokens(2, 9))


def test_one_token_and_the_scale_of_the_model() -> None:
    # scale 1 / sqrt(12) is that of heads of 12
    text = "attention scaled { attend full scale 1 / sqrt(12) }"
    for n in (1, 6):
        wanted = hidden(bert("eager"), tokens(2, n))
        assert difference(hidden(bert(named(text)), tokens(2, n)), wanted) < TOLERANCE


def test_without_the_mask_function_padding_is_dropped() -> None:
    # what `register` prevents: the same attention function, registered alone
    ids, mask = tokens(3, 13), padded(13, left=False)
    attention = transformers.AttentionInterface()[named(FULL)]
    transformers.AttentionInterface.register("attnspec_alone", attention)
    wanted = hidden(bert("eager"), ids, mask)
    assert difference(hidden(bert("attnspec_alone"), ids, mask), wanted, mask) > 0.01


def test_dropout_acts_in_training_only() -> None:
    ids = tokens(2, 9)
    model = bert(named(FULL), attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    assert difference(hidden(model, ids), hidden(model, ids)) == 0.0
    model.train()
    assert difference(hidden(model, ids), hidden(model, ids)) > 0.01


def test_a_name_stands_for_one_spec() -> None:
    spec = attnspec.parse(CAUSAL)
    assert register(spec) == "attnspec_past"
    name = register(spec, "attnspec_once")
    assert register(attnspec.parse(CAUSAL), name) == name
    for other in ({"spec": attnspec.parse(WINDOW)}, {"spec": spec, "backend": "dense"}):
        assert "registered for another" in refused(register, name=name, **other)
    ids = tokens(1, 9)
    before = hidden(llama(name), ids)
    assert register(attnspec.parse(WINDOW), name, override=True) == name
    assert difference(hidden(llama(name), ids), before) > 0.001


def test_modules_and_emitted_classes_are_taken_as_they_are() -> None:
    # a name of its own: what other tests register stays registered
    spec = attnspec.parse(LONGFORMER.replace("attention longformer", "attention as_a_class"))
    emitted: dict[str, Any] = {"__name__": "as_a_class_attn"}
    exec(compile(spec.emit(), "as_a_class_attn.py", "exec"), emitted)
    module, ids = spec.compile(), tokens(2, 11)
    names = register(emitted["AsAClass"]), register(module, "attnspec_module")
    assert names[0] == register(emitted["AsAClass"]) == "attnspec_as_a_class"
    assert register(module, names[1]) == names[1]
    for name in names:
        assert difference(hidden(bert(name), ids), hidden(bert(named(LONGFORMER)), ids)) == 0.0


@pytest.mark.parametrize(
    ("build", "text", "pattern", "written"),
    [
        (llama, "attend window(radius = 2)", r"position 0 .* statement `(\w+)`", "{} attend"),
        (llama, "heads 3 causal attend full", r"write `(heads \d)`", "{} causal attend"),
        (bert, "heads 7 attend full head 0 { attend self }", r"write `(heads \d)`", "{} attend"),
        (bert, "layers 2 attend full layer 0 { attend self }", r"write `(layers \d)`", "{} attend"),
        (bert, "layers 4 attend full layer 0 { attend self }", r"write `(layers \d)`", "{} attend"),
        (bert, "attend full scale 0.5", r"must be the model's.*leave `scale` out()", "{} attend"),
    ],
)
def test_the_advice_is_followed(build: Any, text: str, pattern: str, written: str) -> None:
    ids, body = tokens(2, 9), text[text.index("attend") + 6 :].replace("scale 0.5", "")
    message = refused(hidden, build(named(f"attention a {{ {text} }}")), ids)
    (words,) = re.findall(pattern, message)
    followed = f"attention a {{ {written.format(words)} {body} }}"
    assert_attends(build(named(followed)), attnspec.parse(followed), ids)


def test_documents_are_said_in_the_spec() -> None:
    ids = tokens(1, 6)
    given: dict[str, Any] = {"position_ids": torch.arange(6)[None] % 3, "use_cache": False}
    message = refused(llama(named(CAUSAL)), ids, **given)
    assert "asks for a packed mask" in message
    marks = {"x": torch.ones(1, 6, dtype=torch.bool)}
    other = llama(named("attention a { input x: tokens causal attend full | columns(x) }"))
    assert "asks for a packed mask" in refused(other, ids, attnspec_inputs=marks, **given)
    graph, word, declared = (
        re.findall(pattern, message)[0]
        for pattern in (r"`(same\(\w+\))`", r"with `(\w+)`", r"`(input \w+: ids)`")
    )
    model = llama(named(f"attention d {{ {declared} {word} attend {graph} }}"))
    inputs = {"document": torch.arange(6)[None] // 3}
    with torch.no_grad():
        found = model(ids, attention_mask=torch.ones(1, 6), attnspec_inputs=inputs, **given).logits
        assert difference(found, llama("eager")(ids, **given).logits) < TOLERANCE


def test_chunks_and_windows_of_the_model_are_switched_off(tmp_path: Any) -> None:
    def build(attention: str, **changed: Any) -> Any:
        own = {"attention_chunk_size": 4, "head_dim": 8, "num_key_value_heads": 2, **changed}
        model = tiny("Llama4Text", "ForCausalLM", attention, **own)
        # the experts are empty otherwise
        torch.manual_seed(2)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        return model

    ids = tokens(2, 9)
    message = refused(hidden, build(named(CAUSAL)), ids)
    assert "asks for a chunked mask" in message
    changed = settings_of(message)
    wanted = hidden(build("eager", **changed), ids)
    assert difference(hidden(build(named(CAUSAL), **changed), ids), wanted) < TOLERANCE
    # a setting goes to `from_pretrained`, too
    family = BY_STEM["Mistral"]
    family.build().save_pretrained(tmp_path)
    load, given = transformers.AutoModel.from_pretrained, {"attn_implementation": named(CAUSAL)}
    changed = settings_of(refused(family.hidden, load(tmp_path, **given)))
    wanted = family.hidden(load(tmp_path, attn_implementation="eager", **changed))
    assert difference(family.hidden(load(tmp_path, **given, **changed)), wanted) < TOLERANCE


def test_weights_of_the_models_own_attention() -> None:
    model, ids = bert(named(FULL)), tokens(2, 9)
    (name,) = re.findall(
        r'set_attn_implementation\("(\w+)"\)', refused(model, ids, output_attentions=True)
    )
    model.set_attn_implementation(name)
    weights = model(ids, output_attentions=True).attentions
    assert [w.shape for w in weights] == [(2, 4, 9, 9)] * 3


def test_the_function_scales_as_it_is_told_and_drops_nothing_in_evaluation() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(3))
    out, weights = called(named(FULL), scaling=0.7, position_ids=torch.arange(4), use_cache=True)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.7)
    assert difference(out, wanted.transpose(1, 2)) < TOLERANCE
    assert out.is_contiguous()
    assert weights is None

    # terms that are given as nothing, and a layer that says which it is
    assert called(named(FULL), softcap=None, novelty=None)[0].shape == (1, 4, 2, 8)
    text = "attention layered { layers 2 attend full layer 0 { attend self } }"
    assert called(named(text), layer={"layer_idx": 1})[0].shape == (1, 4, 2, 8)


UNSTABLE = [
    ("causal attend window(before = isqrt(n), after = 0)", "a number in place of `isqrt(n)`"),
    (
        "causal attend window(before = 2, after = 0) | columns(last(4))",
        "changes as the sequence grows",
    ),
    ("causal attend self | expander(degree = 4)", "use `random(keys = …)`"),
    ("causal attend where(q - k <= n // 4)", "compare q and k with numbers"),
]


@pytest.mark.parametrize(("body", "words"), UNSTABLE)
def test_generation_with_rows_that_change_is_refused(body: str, words: str) -> None:
    spec, ids = attnspec.parse(f"attention a {{ {body} }}"), tokens(2, 20)
    model = llama(named(spec.source))
    message = refused(model.generate, ids, **GREEDY)
    assert "step by step would give other results" in message
    assert words in message
    # a step of the module says the same, with the same term and repair
    with pytest.raises(ValueError, match=re.escape(message)):
        spec.compile().step(*torch.randn(3, 1, 2, 3, 4))
    # without a cache they run, and rows are others
    whole = hidden(model, ids)
    apart = [difference(whole[:, n - 1], hidden(model, ids[:, :n])[:, -1]) for n in (5, 9, 15)]
    assert max(apart) > 0.01
    model.generate(ids, use_cache=False, max_new_tokens=1)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("attend self | random(keys = 3)", "`random(keys = 3)` draws among all n"),
        ("attend self | random_blocks(size = 4, blocks = 1)", "add the statement `causal`"),
        ("attend self | expander(degree = 2)", "draws cycles through all n"),
        ("attend self | columns(last(3))", "`columns(last(3))` reads `last(3)`"),
        ("attend window(radius = isqrt(n))", "in place of `isqrt(n)`"),
        ("attend window(radius = 2) | global(first(2))", ""),
        ("attend shift(causal, by = 1) | self", ""),
        ("causal attend self | random(keys = 3)", ""),
        ("causal attend self | random_blocks(size = 3, blocks = 2)", ""),
    ],
)
def test_padding_beside_rows_that_change_warns_once(body: str, words: str) -> None:
    model, ids, mask = bert(named(f"attention a {{ {body} }}")), tokens(3, 13), padded(13, False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = hidden(model, ids, mask)
        hidden(model, ids, mask)
    said = [str(each.message) for each in caught if "padded sample" in str(each.message)]
    assert [words in each for each in said] == [True] * bool(words)
    # and it is so: the sample of 8 tokens is another alone, or the same
    apart = difference(found[1:2, :8], hidden(model, ids[1:2, :8]))
    assert apart > 0.01 if words else apart < TOLERANCE


@pytest.mark.parametrize("body", ["attend columns(first(1))", "attend self | random(keys = 3)"])
def test_positions_that_count_from_padding_on_the_left_warn(body: str) -> None:
    model = llama(named(f"attention a {{ causal {body} }}"))
    with pytest.warns(UserWarning, match="padding on the left shifts the positions of all tokens"):
        hidden(model, tokens(3, 13), padded(13, left=True))


def test_steps_that_count_every_token_belong_to_one_document() -> None:
    body = "input d: ids causal attend window(before = 3, after = 0) & same(d)"
    model, ids = llama(named(f"attention a {{ {body} }}")), tokens(2, 7)
    settings = {**GREEDY, "attention_mask": padded(7, left=True)[:2].long(), "pad_token_id": 0}
    wanted = model.generate(ids, use_cache=False, **settings)
    caches: list[dict[str, Any]] = [{}, {"past_key_values": SpecCache(model)}]
    assert all(bool((model.generate(ids, **settings, **x) == wanted).all()) for x in caches)
    # a step behind a packed pass does not say which documents came before
    positions = torch.arange(7)[None] % 4
    packed = model(ids, position_ids=positions)
    refused(model, ids[:, :1], past_key_values=packed.past_key_values)
    # what is trained on packed documents can generate
    assert bool((model.generate(ids, **settings) == wanted).all())
    # positions that are written over show other documents
    positions.copy_(torch.arange(7)[None])
    with torch.no_grad():
        out, wanted = (model(ids, position_ids=p).logits for p in (positions, positions.clone()))
        assert difference(out, wanted) == 0.0 < difference(out, packed.logits)


@pytest.mark.parametrize("said", ["position_ids", "attnspec_inputs"])
def test_a_cache_of_two_documents_is_not_taken_for_one(said: str) -> None:
    body = "input d: ids causal attend window(before = 3, after = 0) & same(d)"
    model, ids, at = llama(named(f"attention a {{ {body} }}")), tokens(1, 7), torch.arange(7)[None]
    with torch.no_grad():
        packed = {"position_ids": at % 4, "attnspec_inputs": {"d": at // 4}}[said]
        cache = model(ids, **{said: packed}).past_key_values
        # another sequence, of one document, in between
        model(ids[:, :5])
        refused(model, ids[:, :1], past_key_values=cache)


def test_inputs_that_are_not_there_or_too_short() -> None:
    name = named("attention a { input m: tokens causal attend self | columns(m) }")
    model, ids, marked = llama(name), tokens(2, 7), torch.ones(2, 7, dtype=torch.bool)
    message = refused(model.generate, ids, max_new_tokens=2)
    assert "`attnspec_inputs={input: tensor}`" in message
    assert "under `with_inputs(name, {input: tensor})`" in message
    with with_inputs(name, {"m": marked}):
        wanted = hidden(model, ids)
        assert "8 positions, got 7" in refused(model.generate, ids, **GREEDY)
    # what stands, stands only within; and what a call brings is taken before it
    with with_inputs(name, {"m": ~marked}), torch.no_grad():
        assert difference(model(ids, attnspec_inputs={"m": marked}).logits, wanted) == 0.0
    refused(model, ids)
    length = named("attention l { input r: length causal attend prefix(r) | self }")
    with with_inputs(length, {"r": torch.tensor([7, 7])}):
        assert "the length `r` grows with every generated token" in refused(
            llama(length).generate, ids, **GREEDY
        )
    message = refused(with_inputs("eager", {}).__enter__)
    assert "name must be that of a registered spec, got 'eager'" in message
