"""Each family of models: it takes a spec, says what to set first, or says that it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from model_families import FAMILIES, PAGE, Family, Outcome, converted, outcome, row
from tiny_models import (
    CAUSAL,
    FULL,
    bert,
    difference,
    named,
    names_restored,
)
from transcripts import blocks, run_python

import attnspec
from attnspec.integrations.model_mask import NoTensorError
from attnspec.integrations.transformers import convert, used_by

BY_STEM = {family.stem: family for family in FAMILIES}
OWN_CODE = (
    "BigBird Bloom Deberta DebertaV2 Falcon Funnel GPTJ GPTNeo LED Longformer MPNet Mpt XLNet"
).split()
"""Families that compute attention without asking for a function."""

SILENT = ("Deberta", "DebertaV2", "Funnel", "XLNet")
"""Those of them that would run and give what they gave without a spec."""


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


@cache
def found(family: Family) -> tuple[Outcome, Outcome]:
    with names_restored():
        return outcome(family), converted(family)


# one worker builds each family, once
together = pytest.mark.xdist_group("families")


@together
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_the_page_says_what_comes_of_a_spec(family: Family) -> None:
    assert row(family, *found(family)) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_names_every_family_once() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = page.split("<!-- families -->\n")[1].split("<!-- /families -->")[0].splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:]] == [f.title for f in FAMILIES]


@together
def test_what_was_tested_is_what_the_page_claims() -> None:
    built = {family.stem: found(family)[0].kind for family in FAMILIES}
    there = {family.stem: found(family)[1].kind for family in FAMILIES}
    assert sorted(stem for stem, kind in built.items() if kind == "no") == sorted(OWN_CODE)
    assert {"takes it", "with settings", "converted"} <= set(built.values())
    refused = sorted(stem for stem, kind in there.items() if kind == "no")
    assert refused == sorted({*OWN_CODE})
    assert set(there.values()) == {"takes it", "no"}


def test_the_pages_python_runs() -> None:
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(PAGE.read_text(encoding="utf-8"))):
        run_python(block, names, f"{PAGE.name}, block {number}")


# --- models with attention in code of their own -----------------------------------------------


@pytest.mark.parametrize("stem", OWN_CODE)
def test_a_model_that_would_not_ask_refuses_when_it_is_built(stem: str) -> None:
    with pytest.raises(attnspec.AttnSpecError, match=r"in code of its own .*lists families$"):
        BY_STEM[stem].build(named(FULL))


@pytest.mark.parametrize("stem", OWN_CODE)
def test_a_model_that_would_not_ask_refuses_to_be_switched(stem: str) -> None:
    model = BY_STEM[stem].build()
    before = model.config._attn_implementation
    with pytest.raises(attnspec.AttnSpecError, match="in code of its own"):
        model.set_attn_implementation(named(FULL))
    with pytest.raises(attnspec.AttnSpecError, match="in its own code; attnspec/integrations"):
        convert(model, attnspec.parse(FULL), f"attnspec_for_{stem.lower()}")
    assert model.config._attn_implementation == before
    assert {layer.kind for layer in used_by(model)} == {"cannot"}


def test_a_model_that_inherits_from_one_that_would_not_ask_refuses() -> None:
    class Own(type(BY_STEM["Deberta"].build())):  # type: ignore[misc]
        pass

    config = BY_STEM["Deberta"].build().config
    config._attn_implementation = named(FULL)
    with pytest.raises(attnspec.AttnSpecError, match="Own computes it in code of its own"):
        Own(config)


def test_a_model_within_a_model_refuses_to_be_switched() -> None:
    class Pair(type(BY_STEM["Bert"].build())):  # type: ignore[misc]
        pass

    pair = Pair(BY_STEM["Bert"].build().config)
    pair.second = BY_STEM["Deberta"].build()
    message = "DebertaModel computes it in code.*`convert` the parts that do ask"
    with pytest.raises(attnspec.AttnSpecError, match=message):
        pair.set_attn_implementation(named(FULL))


@pytest.mark.parametrize("stem", SILENT)
def test_a_spec_that_is_ignored_is_not_said_to_be_used(stem: str) -> None:
    # a config that was changed by hand, past every check: the model runs as it did before
    family = BY_STEM[stem]
    model = family.build()
    wanted = family.hidden(model)
    model.config._attn_implementation = named("attention nothing { attend self }")
    assert difference(family.hidden(model), wanted) == 0.0
    assert {layer.kind for layer in used_by(model)} == {"cannot"}


@pytest.mark.parametrize("stem", ["BigBird", "Bloom", "LED", "Longformer", "MPNet", "Mpt"])
def test_a_mask_that_is_taken_for_a_tensor_says_so(stem: str) -> None:
    family = BY_STEM[stem]
    model = family.build()
    model.config._attn_implementation = named(FULL)
    with pytest.raises(NoTensorError, match="this one computes it in code of its own"):
        family.hidden(model)


def test_transformers_own_attentions_are_taken_as_before() -> None:
    named(FULL)
    for stem in ("GPTJ", "Bert"):
        model = BY_STEM[stem].build()
        model.set_attn_implementation("eager")
        BY_STEM[stem].hidden(model)
    model = bert("eager")
    model.set_attn_implementation(attn_implementation="sdpa")
    assert str(used_by(model)[0]).endswith(": dense, `sdpa` of transformers")


# --- what each layer uses ---------------------------------------------------------------------


def test_a_line_for_each_layer() -> None:
    text = "attention lines { layers 3 attend full layer 0 { attend self } }"
    assert str(used_by(bert(named(text)))).splitlines() == [
        f"encoder.layer.{layer}.attention.self: spec, `lines`, layer {layer}" for layer in range(3)
    ]
    assert {layer.kind for layer in used_by(bert("eager"))} == {"dense"}
    assert used_by(torch.nn.Linear(2, 2)) == ()
    own = torch.nn.Sequential(attnspec.SelfAttention(attnspec.parse(CAUSAL), 8, 2))
    assert str(used_by(own)) == "0.attention: spec, `past`"


@pytest.mark.parametrize(
    ("stem", "text", "reason"),
    [
        ("Llama", FULL, "must not read the future"),
        ("Llama", "attention e { attend linear() }", "a mechanism reads every position"),
        ("Gemma2", CAUSAL, "passes `sliding_window` and `softcap` too"),
        ("Mistral", CAUSAL, "passes `sliding_window` too"),
        ("Bart", CAUSAL, "this is cross-attention"),
        ("Bart", CAUSAL, "this decoder read the encoder's"),
        ("T5", FULL, "passes `position_bias` too"),
        ("DistilBert", "attention e { layers 2 attend full }", "leave `layers` out"),
        ("Llama", "attention e { causal heads 7 attend full }", "has 7 heads, the model 4"),
        ("Bert", "attention e { layers 3 attend full }", "has 3 layers, the model 2"),
    ],
)
def test_what_cannot_be_used_is_said_before_a_call(stem: str, text: str, reason: str) -> None:
    model = BY_STEM[stem].build(named(text))
    assert any(layer.kind == "cannot" and reason in layer.what for layer in used_by(model))


def test_layers_are_known_without_source() -> None:
    # as in a notebook: transformers would look for the file of the class
    source = """
class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

class AskingAttention(OwnAttention):
    def forward(self, x):
        return ALL.get_interface(self.config._attn_implementation, None)(self, x)
"""
    names: dict[str, Any] = {"nn": torch.nn, "torch": torch, "__name__": "nowhere"}
    exec(source, names)
    model = torch.nn.ModuleDict(
        {"own": names["OwnAttention"](), "asks": names["AskingAttention"]()}
    )
    model["asks"].config = bert(named(FULL)).config
    assert [(layer.path, layer.kind) for layer in used_by(model)] == [
        ("own", "cannot"),
        ("asks", "spec"),
    ]
