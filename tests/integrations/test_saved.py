"""A converted model that is saved is loaded as it was saved, also by another process; decoders that
are meant to read both ways."""

from __future__ import annotations

import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
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
)
from tiny_models import transformers as hf
from torch import Tensor

import attnspec
from attnspec.integrations.transformers import convert, from_pretrained, used_by, with_inputs
from attnspec.testing import assert_attends

PREFIX = "attention p { input prompt: length attend causal | prefix(prompt) }"
BOTH = "transformers", "attnspec"
LOADED = """
import sys, torch, NAMES
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    torch.save(model(torch.arange(3, 23)[None]).logits, sys.argv[1] + "/logits.pt")
"""


@pytest.mark.parametrize(
    "names",
    ["", *(pytest.param(f"{x}, {y}", marks=pytest.mark.slow) for x, y in permutations(BOTH))],
)
def test_a_step_of_training_is_loaded_by_another_process(names: str, tmp_path: Path) -> None:
    """And by this one, where the process has no name of a package to import first."""
    model, ids = llama("eager"), torch.arange(3, 23)[None]
    convert(model.train(), attnspec.parse(SINKS), positions="real")
    first = model(input_ids=ids, labels=ids).loss
    first.backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    assert model(input_ids=ids, labels=ids).loss < first
    model.save_pretrained(tmp_path)
    if names:
        code = LOADED.replace("NAMES", names)
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], check=True)
        found = torch.load(tmp_path / "logits.pt")
    else:
        found = hidden(hf.AutoModelForCausalLM.from_pretrained(tmp_path), ids)
    torch.testing.assert_close(found, hidden(model.eval(), ids))


def test_transformers_loads_what_was_saved(tmp_path: Path) -> None:
    model, ids, mask = llama("eager"), tokens(3, 9), padded(9, left=True)
    given: dict[str, Any] = {"only": "model.layers.1", "causal": True, "positions": "real"}
    spec = attnspec.parse(SINKS)
    convert(model, spec, backend="dense", **given)
    model.save_pretrained(tmp_path)
    words = {**given, "only": ["model.layers.1"], "backend": "dense", "spec": spec.source}
    for kind in (hf.AutoModelForCausalLM, hf.LlamaForCausalLM):
        loaded = kind.from_pretrained(tmp_path)
        assert type(loaded) is hf.LlamaForCausalLM
        assert difference(hidden(loaded, ids, mask), hidden(model, ids, mask), mask) < TOLERANCE
        assert loaded.config.attnspec == words
    again: Any = from_pretrained(tmp_path)
    again.model.save_pretrained(tmp_path)
    assert used_by(hf.AutoModel.from_pretrained(tmp_path))[1].kind == "spec"
    again.undo()
    again.model.save_pretrained(tmp_path)
    assert {x.kind for x in used_by(hf.AutoModel.from_pretrained(tmp_path))} == {"dense"}


def test_the_model_card_says_what_was_converted(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    card.write_text("# Mine\n", encoding="utf-8")
    for text in (WINDOW, SINKS):
        with convert(model := bert("eager"), attnspec.parse(text), causal=False):
            model.save_pretrained(tmp_path)
    words = card.read_text(encoding="utf-8")
    assert words.startswith("# Mine\n")
    assert words.count("## Sparse attention") == 1
    assert "columns(first(2))" in words
    assert "transformers alone loads it with" in words


def test_saving_warns_of_settings_that_no_config_holds(tmp_path: Path) -> None:
    convert(model := bert("eager"), attnspec.parse(WINDOW).compile())
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="was saved with sparse attention"):
        hf.AutoModel.from_pretrained(tmp_path)


def prefixed(ids: Tensor, prompt: Tensor) -> Tensor:
    """The logits of the model's own attention under the mask of a prompt read both ways."""
    at = torch.arange(ids.shape[1])
    mask = (at <= at[:, None]) | (at < prompt[:, None, None])
    return hidden(llama("eager"), ids, torch.where(mask, 0.0, -torch.inf)[:, None])


def test_a_prompt_that_is_read_both_ways() -> None:
    model, ids, prompt = llama("eager"), tokens(2, 20), torch.tensor([5, 12])
    with pytest.raises(attnspec.AttnSpecError, match="`convert` with `causal=False`"):
        convert(model, attnspec.parse(PREFIX))
    switched: Any = (model, model.model)
    with convert(model, attnspec.parse(PREFIX), causal=False) as done:
        assert [x.config.is_causal for x in switched] == [False, False]
        assert not model.model.layers[0].self_attn.is_causal
        with with_inputs(done, {"prompt": prompt}):
            assert difference(hidden(model, ids), prefixed(ids, prompt)) < TOLERANCE
            written = [
                model.generate(ids, max_new_tokens=4, do_sample=False, **more)
                for more in ({}, {"cache_implementation": "static"})
            ]
    for _ in range(4):
        ids = torch.cat([ids, prefixed(ids, prompt)[:, -1:].argmax(-1)], 1)
    assert all((each == ids).all() for each in written)
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
    own = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    model = tiny("Gemma3Text", head_dim=8, use_bidirectional_attention=True, **own)
    call = {"input_ids": tokens(3, 20), "attention_mask": padded(20, left=False)}
    before = hidden(model, *call.values())
    text = "attention e { layers 2 attend window(radius = 4) layer 1 { attend full } }"
    assert_attends(model, attnspec.parse(text), call=call)
    convert(model, attnspec.parse(text))
    found = hidden(model, *call.values())
    assert difference(found, before, call["attention_mask"]) < TOLERANCE
