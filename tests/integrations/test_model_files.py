"""A converted model that is saved is loaded as it was saved, and its model card says so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    TOLERANCE,
    WINDOW,
    bert,
    difference,
    hidden,
    llama,
    names_restored,
    padded,
    tokens,
)
from tiny_models import transformers as hf

import attnspec
from attnspec.integrations.transformers import convert, from_pretrained, used_by, with_inputs

PREFIX = "attention p { input prompt: length attend causal | prefix(prompt) }"
SINKS = "attention s { causal attend window(before = 2, after = 0) | columns(first(1)) }"


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


def test_transformers_loads_what_was_saved(tmp_path: Path) -> None:
    model, ids, mask = llama("eager"), tokens(3, 9), padded(9, left=True)
    given: dict[str, Any] = {
        "only": "model.layers.1",
        "causal": True,
        "positions": "real",
        "backend": "dense",
    }
    convert(model, attnspec.parse(SINKS), **given)
    model.save_pretrained(tmp_path)
    for kind in (hf.AutoModelForCausalLM, hf.LlamaForCausalLM):
        loaded = kind.from_pretrained(tmp_path)
        assert type(loaded) is hf.LlamaForCausalLM
        assert difference(hidden(loaded, ids, mask), hidden(model, ids, mask), mask) < TOLERANCE
        assert loaded.config.attnspec == {**given, "only": ["model.layers.1"], **_spec(SINKS)}
    again: Any = from_pretrained(tmp_path)
    again.model.save_pretrained(tmp_path)
    assert used_by(hf.AutoModel.from_pretrained(tmp_path))[1].kind == "spec"
    again.undo()
    again.model.save_pretrained(tmp_path)
    assert {x.kind for x in used_by(hf.AutoModel.from_pretrained(tmp_path))} == {"dense"}


def _spec(text: str) -> dict[str, str]:
    return {"spec": attnspec.parse(text).source}


def test_the_model_card_says_what_was_converted(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# Mine\n", encoding="utf-8")
    for text in (WINDOW, SINKS):
        with convert(model := bert("eager"), attnspec.parse(text), causal=False):
            model.save_pretrained(tmp_path)
    words = card.read_text(encoding="utf-8")
    assert words.startswith("# Mine\n")
    assert words.count("## Sparse attention") == 1
    assert "columns(first(1))" in words
    assert "transformers alone loads it with" in words


@pytest.mark.parametrize("first", ["attnspec, transformers", "transformers, attnspec"])
def test_an_import_is_enough(first: str, tmp_path: Path) -> None:
    convert(model := bert("eager"), attnspec.parse(WINDOW))
    model.save_pretrained(tmp_path)
    code = f"""import {first}
from transformers import AutoModel
assert AutoModel.from_pretrained({str(tmp_path)!r}).config.attnspec"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_saving_warns_of_settings_that_no_config_holds(tmp_path: Path) -> None:
    convert(model := bert("eager"), attnspec.parse(WINDOW).compile())
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="was saved with a sparse attention"):
        hf.AutoModel.from_pretrained(tmp_path)


# --- decoders that are meant to read both ways ---------------------------------------------------


def prefixed(ids: torch.Tensor, prompt: torch.Tensor) -> torch.Tensor:
    """The logits of the model's own attention under the mask of a prompt read both ways."""
    at = torch.arange(ids.shape[1])
    mask = (at <= at[:, None]) | (at < prompt[:, None, None])
    return hidden(llama("eager"), ids, torch.where(mask, 0.0, -torch.inf)[:, None])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_prompt_that_is_read_both_ways(cache: str) -> None:
    model, ids, prompt = llama("eager"), tokens(2, 20), torch.tensor([5, 12])
    with pytest.raises(attnspec.AttnSpecError, match=r"`convert\(model, spec, causal=False\)`"):
        convert(model, attnspec.parse(PREFIX))
    switched: Any = (model, model.model)
    with convert(model, attnspec.parse(PREFIX), causal=False) as done:
        assert [x.config.is_causal for x in switched] == [False, False]
        assert not model.model.layers[0].self_attn.is_causal
        with with_inputs(done, {"prompt": prompt}):
            assert difference(hidden(model, ids), prefixed(ids, prompt)) < TOLERANCE
            static = {"cache_implementation": "static"} if cache == "static" else {}
            written = model.generate(ids, max_new_tokens=4, do_sample=False, **static)
    for _ in range(4):
        ids = torch.cat([ids, prefixed(ids, prompt)[:, -1:].argmax(-1)], 1)
    assert (written == ids).all()
    assert [getattr(x.config, "is_causal", True) for x in switched] == [True, True]
    assert model.model.layers[0].self_attn.is_causal


def test_rows_that_are_not_done_are_refused() -> None:
    model, ids = llama("eager"), tokens(1, 8)
    convert(model, attnspec.parse(PREFIX), causal=False)
    cache, given = hf.DynamicCache(), {"attnspec_inputs": {"prompt": torch.tensor([4])}}
    model(ids[:, :4], past_key_values=cache, **given)
    with pytest.raises(attnspec.AttnSpecError, match="position 0 reads position 4, which was not"):
        model(ids, past_key_values=cache, attnspec_inputs={"prompt": torch.tensor([6])})


def test_a_model_that_reads_both_ways_by_its_config_says_so_itself() -> None:
    config = hf.Gemma3TextConfig(
        **{"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61},
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=48,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        use_bidirectional_attention=True,
        pad_token_id=0,
    )
    model: Any = hf.Gemma3TextModel(config).eval()
    ids, mask = tokens(3, 20), padded(20, left=False)
    before = hidden(model, ids, mask)
    text = "attention e { layers 2 attend window(radius = 4) layer 1 { attend full } }"
    convert(model, attnspec.parse(text))
    assert difference(hidden(model, ids, mask), before, mask) < TOLERANCE
