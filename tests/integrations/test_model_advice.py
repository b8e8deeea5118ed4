"""The way out that a message names is the way out: each is followed, and then the model runs.

Windows and caps of models, and encoders with decoders: test_model_families.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES, settings_of
from tiny_models import (
    CAUSAL,
    FULL,
    LONGFORMER,
    TOLERANCE,
    WINDOW,
    bert,
    difference,
    hidden,
    llama,
    named,
    names_restored,
    reference,
    tokens,
    transformers,
)

import attnspec
from attnspec.integrations.model_advice import of_mask
from attnspec.integrations.transformers import with_inputs

BY_STEM = {family.stem: family for family in FAMILIES}
MARKED = """attention marked { input important: tokens
    causal attend window(before = 2, after = 0) | columns(important) }"""


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


def message_of(call: Any, *arguments: Any, **settings: Any) -> str:
    with pytest.raises(attnspec.AttnSpecError) as caught:
        call(*arguments, **settings)
    return str(caught.value)


# --- what is written in the spec --------------------------------------------------------------


def test_causal_is_written() -> None:
    ids = tokens(2, 9)
    text = LONGFORMER.replace("longformer", "followed")
    message = message_of(hidden, llama(named(text)), ids)
    (word,) = re.findall(r"write `(\w+)` in the spec", message)
    text = text.replace("{", f"{{ {word}")
    spec = attnspec.parse(text)
    wanted = hidden(llama(reference(lambda n, layer: spec.mask(n))), ids)
    assert difference(hidden(llama(named(text)), ids), wanted) < TOLERANCE


def test_scale_is_left_out() -> None:
    ids = tokens(2, 9)
    message = message_of(hidden, bert(named("attention s { attend full scale 0.5 }")), ids)
    assert message.endswith("leave `scale` out of the spec")
    wanted = hidden(bert("eager"), ids)
    assert difference(hidden(bert(named("attention s { attend full }")), ids), wanted) < TOLERANCE


@pytest.mark.parametrize("layers", [2, 4])
def test_layers_are_as_many_as_the_models(layers: int) -> None:
    ids = tokens(2, 9)
    text = "attention l { layers COUNT attend full layer 0 { attend self } }"
    message = message_of(hidden, bert(named(text.replace("COUNT", str(layers)))), ids)
    (count,) = re.findall(r"write `layers (\d)`", message)
    text = text.replace("COUNT", count)
    spec = attnspec.parse(text)
    wanted = hidden(bert(reference(lambda n, layer: spec.mask(n, layer))), ids)
    assert difference(hidden(bert(named(text)), ids), wanted) < TOLERANCE


@pytest.mark.parametrize("build", [bert, llama])
def test_heads_are_as_many_as_the_models(build: Any) -> None:
    ids = tokens(2, 9)
    text = "attention h { causal heads COUNT attend full head 0 { attend self } }"
    message = message_of(hidden, build(named(text.replace("COUNT", "7"))), ids)
    (count,) = re.findall(r"write `heads (\d)`", message)
    text = text.replace("COUNT", count)
    spec = attnspec.parse(text)
    masks = reference(lambda n, layer: np.stack([spec.mask(n, layer, h) for h in range(4)]))
    assert difference(hidden(build(named(text)), ids), hidden(build(masks), ids)) < TOLERANCE


def test_layers_are_left_out_where_the_model_does_not_tell_them_apart() -> None:
    family = BY_STEM["DistilBert"]
    text = "attention l { layers 2 attend full }"
    message = message_of(family.hidden, family.build(named(text)))
    assert "leave `layers` out" in message
    model = family.build(named(text.replace("layers 2", "")))
    assert difference(family.hidden(model), family.hidden(family.build())) < TOLERANCE


def test_documents_are_said_in_the_spec() -> None:
    ids, positions = tokens(1, 6), torch.tensor([[0, 1, 2, 0, 1, 2]])
    given = {"position_ids": positions, "use_cache": False}
    with torch.no_grad():
        wanted = llama("eager")(ids, **given).logits
        message = message_of(llama(named(CAUSAL)), ids, **given)
        graph, word = (
            re.findall(pattern, message)[0] for pattern in (r"`(same\(\w+\))`", r"beside `(\w+)`")
        )
        (declared,) = re.findall(r"`(input \w+: ids)`", message)
        model = llama(named(f"attention d {{ {declared} {word} attend {graph} }}"))
        got = model(
            ids,
            attention_mask=torch.ones(1, 6),
            attnspec_inputs={"document": torch.tensor([[0, 0, 0, 1, 1, 1]])},
            **given,
        ).logits
    assert difference(got, wanted) < TOLERANCE


# --- what is asked of the model ----------------------------------------------------------------


@pytest.mark.parametrize("stem", ["Gemma3Text", "Mistral", "ModernBert"])
def test_settings_go_to_from_pretrained(stem: str, tmp_path: Path) -> None:
    family, text = BY_STEM[stem], FULL if stem == "ModernBert" else CAUSAL
    model = family.build()
    model.save_pretrained(tmp_path)
    name = named(text)
    load = type(model).from_pretrained
    changed = settings_of(message_of(family.hidden, load(tmp_path, attn_implementation=name)))
    wanted = family.hidden(load(tmp_path, attn_implementation="eager", **changed))
    got = family.hidden(load(tmp_path, attn_implementation=name, **changed))
    assert difference(got, wanted) < TOLERANCE


@pytest.mark.parametrize(
    ("rotations", "turned"),
    [
        ({"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, True),
        ({"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e4}}, False),
        ({"rope_type": "default", "rope_theta": 1e4}, False),
        (None, False),
    ],
)
def test_layers_that_will_turn_positions_otherwise_are_said_to(
    rotations: Any, turned: bool
) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    module: Any = torch.nn.Module()
    module.config = SimpleNamespace(layer_types=kinds, rope_parameters=rotations)
    said = of_mask("sliding", module)
    assert '`layer_types = ["full_attention"] * 3`' in said
    assert ("turn positions as the full ones do" in said) is turned
    # layers of one type alone turn as they do
    module.config.layer_types = ["sliding_attention"]
    assert "turn positions" not in of_mask("sliding", module)


def test_chunks_of_the_model_are_switched_off() -> None:
    settings: dict[str, Any] = {
        **BY_STEM["Mixtral"].settings,
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": 4,
    }

    def build(attention: str, **changed: Any) -> Any:
        config = transformers.Llama4TextConfig(**settings, **changed)
        config._attn_implementation = attention
        torch.manual_seed(1)
        model = transformers.Llama4ForCausalLM(config).eval()
        # the experts are empty otherwise
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.2)
        return model

    ids = tokens(2, 9)
    message = message_of(hidden, build(named(CAUSAL)), ids)
    assert "asks for a chunked mask" in message
    changed = settings_of(message)
    torch.manual_seed(2)
    wanted = hidden(build("eager", **changed), ids)
    assert difference(hidden(build(named(CAUSAL), **changed), ids), wanted) < TOLERANCE


def test_the_weights_of_the_models_own_attention() -> None:
    model, ids = bert(named(FULL)), tokens(2, 9)
    message = message_of(model, ids, output_attentions=True)
    (name,) = re.findall(r'set_attn_implementation\("(\w+)"\)', message)
    model.set_attn_implementation(name)
    weights = model(ids, output_attentions=True).attentions
    assert [w.shape for w in weights] == [(2, 4, 9, 9)] * 3


def test_a_cache_without_windows() -> None:
    ids, model = tokens(2, 12), llama(named(WINDOW))
    windows = transformers.MistralConfig(**{**BY_STEM["Mistral"].settings, "num_hidden_layers": 3})

    def steps(cache: Any) -> torch.Tensor:
        parts = ids[:, :8], ids[:, 8:9], ids[:, 9:]
        with torch.no_grad():
            return torch.cat([model(x, past_key_values=cache).logits for x in parts], 1)

    message = message_of(steps, transformers.DynamicCache(config=windows))
    assert "`past_key_values = DynamicCache()`" in message
    assert difference(steps(transformers.DynamicCache()), hidden(model, ids)) < TOLERANCE


# --- run-time inputs in `generate` ------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_under_inputs_is_step_by_step(cache: str) -> None:
    name = named(MARKED)
    model, ids = llama(name), tokens(2, 7)
    important = torch.zeros(2, 20, dtype=torch.bool)
    important[0, 1] = important[1, 9] = True
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    if cache == "static":
        settings |= {"cache_implementation": "static", "disable_compile": True}
    with with_inputs(name, {"important": important}):
        got = model.generate(ids, **settings)
    wanted = ids
    for n in range(7, 15):
        with torch.no_grad():
            out = model(wanted, attnspec_inputs={"important": important[:, :n]}, use_cache=False)
        wanted = torch.cat([wanted, out.logits[:, -1:].argmax(-1)], 1)
    assert got.tolist() == wanted.tolist()
    # and the marks are felt
    nothing = torch.zeros_like(important)
    with with_inputs(name, {"important": nothing}):
        assert model.generate(ids, **settings).tolist() != got.tolist()


def test_generate_reads_numbers() -> None:
    name = named(
        "attention a { causal input time: numbers"
        " attend where(time(q) - time(k) <= 2) & window(before = 6, after = 0) | self }"
    )
    model, ids = llama(name), tokens(2, 7)
    time = torch.rand(2, 20).cumsum(1) * 4
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with with_inputs(name, {"time": time}):
        got = model.generate(ids, **settings)
    wanted = ids
    for n in range(7, 13):
        with torch.no_grad():
            out = model(wanted, attnspec_inputs={"time": time[:, :n]}, use_cache=False)
        wanted = torch.cat([wanted, out.logits[:, -1:].argmax(-1)], 1)
    assert got.tolist() == wanted.tolist()
    with torch.no_grad():
        one, other = (
            model(ids, attnspec_inputs={"time": scale * time[:, :7]}).logits for scale in (1, 0)
        )
    assert difference(one, other) > TOLERANCE


def test_a_model_without_its_inputs_says_how_to_give_them() -> None:
    name = named(MARKED)
    model, ids = llama(name), tokens(2, 7)
    message = message_of(model.generate, ids, max_new_tokens=2)
    assert "`attnspec_inputs={input: tensor}`" in message
    assert "under `with_inputs(name, {input: tensor})`" in message
    important = torch.zeros(2, 7, dtype=torch.bool)
    with with_inputs(name, {"important": important}):
        wanted = hidden(model, ids)
        message = message_of(model.generate, ids, max_new_tokens=2, do_sample=False)
    assert "must reach as far as the sequence, 8 positions, got 7" in message
    # what stands, stands only within; and what a call brings is taken before it
    with with_inputs(name, {"important": ~important}), torch.no_grad():
        got = model(ids, attnspec_inputs={"important": important}).logits
    assert difference(got, wanted) == 0.0
    message_of(model, ids)


def test_a_length_cannot_stand() -> None:
    name = named("attention l { input real: length causal attend window(before = 2, after = 0) }")
    with with_inputs(name, {"real": torch.tensor([7, 7])}):
        message = message_of(llama(name).generate, tokens(2, 7), max_new_tokens=3)
    assert "the length `real` changes with every token" in message


def test_inputs_stand_under_the_name_of_a_spec() -> None:
    message = message_of(with_inputs("eager", {}).__enter__)
    assert "the name of a registered spec is needed, got 'eager'" in message
