"""Models of transformers held against specs: caches, padding, packed documents; the command."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from model_families import FAMILIES
from model_settings import IMPLEMENTATIONS, MODELS, PAGE, SETTINGS, outcome, uncompiled
from tiny_models import CAUSAL, WINDOW, bert, llama, names_restored, padded, tokens, transformers

import attnspec
from attnspec import verify_model
from attnspec.cli import main
from attnspec.integrations.transformers import convert, register

PAST, RECENT = attnspec.parse(CAUSAL), attnspec.parse(WINDOW)
DOCUMENTS = attnspec.parse("attention docs { input document: ids causal attend same(document) }")
CROSS = attnspec.parse("attention both { cross attend full }")
POSITIONS = torch.cat([torch.arange(5), torch.arange(7)])[None]
ONES = torch.ones(2, 12, dtype=torch.long)
BY_STEM = {family.stem: family for family in FAMILIES}


def mistral(**settings: Any) -> Any:
    config = transformers.MistralConfig(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        sliding_window=5,
        **settings,
    )
    return transformers.MistralForCausalLM(config).eval()


def test_the_known_leak_of_packed_documents_is_reported() -> None:
    call: dict[str, Any] = {"input_ids": tokens(2, 12), "position_ids": POSITIONS}
    model = llama("sdpa")
    assert verify_model(model, DOCUMENTS, **call, use_cache=False).ok
    for leaking, way_out in (
        ({}, "equal with `use_cache=False`"),
        ({"attention_mask": ONES, "use_cache": False}, "equal without `attention_mask`"),
        ({"attention_mask": ONES}, "equal without `attention_mask` and with `use_cache=False`"),
    ):
        found = verify_model(model, DOCUMENTS, **call, **leaking)
        assert found.leaks[0] == (0, 0, 0, 5, 0)
        assert "another document is read" in str(found)
        assert way_out in str(found)


def test_a_window_that_is_ignored_beside_a_cache_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = mistral(), tokens(2, 16)
    cache = transformers.DynamicCache(config=model.config)
    model(ids[:, :9], past_key_values=cache)
    assert verify_model(model, RECENT, ids[:, 9:], past_key_values=cache).ok
    assert cache.get_seq_length() == 9
    whole = transformers.DynamicCache()
    model(ids[:, :9], past_key_values=whole)
    monkeypatch.setattr(model.config, "sliding_window", None)
    found = verify_model(model, RECENT, ids[:, 9:], past_key_values=whole)
    assert found.leaks[0] == (0, 0, 0, 9, 0)
    assert "DynamicCache with 9 positions" in str(found)


def test_grouped_heads_repeated_wrongly_by_transformers_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mistral(attn_implementation="eager")
    assert verify_model(model, RECENT, tokens(2, 12)).ok
    modeling: Any = transformers.models.mistral.modeling_mistral
    monkeypatch.setattr(modeling, "repeat_kv", lambda x, count: x.repeat(1, count, 1, 1))
    found = verify_model(model, RECENT, tokens(2, 12))
    assert "query head 1 reads the values of head 1" in str(found)


@pytest.mark.filterwarnings("ignore:`sinks` names positions")
def test_padding_on_either_side_and_where_positions_count_from() -> None:
    every, sinks = (
        attnspec.parse(f"attention {name} {{ {body} }}")
        for name, body in (
            ("all", "attend full"),
            ("sinks", "causal attend columns(first(2)) | self"),
        )
    )
    ids = tokens(3, 12)
    for left in (True, False):
        call: dict[str, Any] = {"input_ids": ids, "attention_mask": padded(12, left=left)}
        assert verify_model(bert("sdpa"), every, **call).ok
        assert verify_model(llama("eager"), PAST, **call).ok
        model = bert("sdpa")
        # a mask of ones: padding is read, and the spec is told which that is
        read = {**call, "attention_mask": torch.ones_like(call["attention_mask"])}
        model.forward = lambda *args, _call=model.forward, _read=read, **kwargs: _call(**_read)
        found = verify_model(model, every, **call)
        assert "padding is read" in str(found)
    with names_restored(), convert(llama("eager"), sinks) as done:
        call = {"input_ids": ids, "attention_mask": padded(12, left=True)}
        assert verify_model(done.model, sinks, **call).ok
        # the first tokens of the text are not the first of the sequence
        assert verify_model(done.model, sinks, **call, positions="real").missing


def test_cross_attention_needs_a_spec_that_says_so() -> None:
    family = BY_STEM["Bart"]
    model, call = family.build(), family.inputs()
    found = verify_model(model, CROSS, call=call)
    assert found.ok
    assert [layer.layer for layer in found.layers if layer.reason is None] == [0, 1]
    found = verify_model(model, PAST, call=call, layers=[2, 3])
    assert found.ok
    assert "it reads another sequence, and the spec is of one" in str(found)


@pytest.mark.parametrize("stem", ["DebertaV2", "XLNet", "Falcon", "Longformer", "Albert", "ViT"])
def test_families_with_code_of_their_own(stem: str) -> None:
    family = BY_STEM[stem]
    text = {"Falcon": "causal attend full", "Longformer": "attend window(radius = 2)"}
    spec = attnspec.parse(f"attention own {{ {text.get(stem, 'attend full')} }}")
    found = verify_model(family.build(), spec, call=family.inputs())
    assert found.ok, found
    assert (found.layers[0].heads is None) is (stem == "Longformer")


def test_packed_documents_are_found_beside_a_mask_by_converted_and_registered_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    log = logging.getLogger("attnspec")
    monkeypatch.setattr(log, "info", lambda words, *parts: said.append(words % parts))
    call: dict[str, Any] = {"input_ids": tokens(2, 12), "position_ids": POSITIONS}
    with names_restored():
        model = llama("eager")
        convert(model, DOCUMENTS)
        for built in (model, llama(register(DOCUMENTS, "attnspec_packed"))):
            for settings in ({}, {"attention_mask": ONES}, {"use_cache": False}):
                said.clear()
                call["position_ids"] = POSITIONS.clone()
                assert verify_model(built, DOCUMENTS, **call, **settings).ok
                assert "2 packed documents a sample; they are the input" in said[0]
        model = llama("eager")
        convert(model, PAST)
        with pytest.warns(UserWarning, match="2 packed documents a sample, which read each other"):
            assert not verify_model(model, DOCUMENTS, **call, attention_mask=ONES).ok
        # said once
        assert verify_model(model, PAST, **call).ok


@pytest.mark.parametrize("model", ["Llama", "GptOss", "Bert"])
def test_the_table_of_the_page_is_what_happens(model: str) -> None:
    rows = [line.strip("| \n").split(" | ") for line in PAGE.read_text("utf-8").splitlines()]
    table = {(row[0], row[1].strip("`")): row[2:] for row in rows if len(row) == 2 + len(SETTINGS)}
    assert {name for name, _ in table} - {"model", "---"} == set(MODELS)
    with names_restored(), uncompiled():
        for at, implementation in enumerate(IMPLEMENTATIONS):
            for setting in SETTINGS[at::3]:
                cell = table[model, implementation][SETTINGS.index(setting)]
                assert outcome(model, implementation, setting) == cell, (implementation, setting)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "past.attn").write_text(CAUSAL)
    (tmp_path / "docs.attn").write_text(DOCUMENTS.source)
    (tmp_path / "made_here.py").write_text(
        "import torch\nfrom tiny_models import llama, tokens\n"
        "def alone(): return llama('sdpa')\n"
        "def called(): return alone(), (tokens(1, 8),), {'use_cache': False}\n"
        "def nothing(): return torch.nn.Linear(2, 2)\n"
    )

    def run(factory: str, *options: str) -> Any:
        return CliRunner().invoke(main, ["verify", "--model", f"made_here:{factory}", *options])

    assert run("alone", "past.attn", "-n", "9").exit_code == 0
    assert "3 attention layers checked" in run("called", "past.attn").stdout
    found = run("called", "docs.attn", "-n", "8", "--input", "document=0*3,1*5", "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["leaks"][0] == [0, 0, 0, 3, 0]
    for factory, words in (
        ("nothing", "no `vocab_size`"),
        ("missing", "makes no model"),
        ("x:", ""),
    ):
        found = run(factory, "past.attn")
        assert found.exit_code == 2
        assert words in found.stderr
    assert run("alone", "docs.attn").exit_code == 2
    assert run("alone", "past.attn", "-n", "9", "--seconds", "0.1").exit_code in (0, 4)
