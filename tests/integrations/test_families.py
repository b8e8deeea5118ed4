"""Each family of models: what comes of a spec, and that a converted model trains, saves, pads and
writes as it should. One table of models (tests/model_families.py), one test for each question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_families import BY_STEM, FAMILIES, OWN_CODE, PAGE, Family, row, score_of, specs_of
from sweeps import checkered, few
from tiny_models import FULL, TOLERANCE, bert, difference, named, tokens

import attnspec
from attnspec.integrations.transformers import SpecCache, convert, used_by

ROWS = PAGE.read_text(encoding="utf-8").split("<!-- families -->\n")[1].split("\n<!-- /fam")[0]
CELLS = dict(zip((x.stem for x in FAMILIES), ROWS.splitlines()[2:], strict=True))
TAKING = [x for x in FAMILIES if f"{OWN_CODE} |" not in CELLS[x.stem]]
KEEPING = [x for x in FAMILIES if x not in TAKING]
WRITING = [x for x in TAKING if x.causal]
STATIC = {"cache_implementation": "static", "disable_compile": True}
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}

OUTCOMES = {x.stem: CELLS[x.stem].split("|")[3:] for x in reversed(FAMILIES)}
FIRST = [BY_STEM[x] for x in {str(cells): stem for stem, cells in OUTCOMES.items()}.values()]
"""A family for each thing that a row says; the rest is slow."""


@pytest.mark.parametrize("family", few(FAMILIES, FIRST), ids=str)
def test_the_page_says_what_comes_of_a_spec(family: Family) -> None:
    assert row(family) == CELLS[family.stem]


@pytest.mark.parametrize("family", few(TAKING, 3), ids=str)
def test_training_padding_and_saving(family: Family, tmp_path: Path) -> None:
    model, twin = family.build(**family.wide), family.build(**family.wide)
    keys, score = list(model.state_dict()), score_of(CELLS[family.stem].replace("…", "2.0"))
    done = convert(model, **specs_of(family, "full", score))
    assert list(model.state_dict()) == keys
    given = family.inputs(left=True)
    assert difference(family.hidden(model, **given), family.hidden(twin, **given)) < TOLERANCE
    for each in (model, twin):
        states = each(**family.inputs())[0]
        weight = torch.randn(states.shape, generator=torch.Generator().manual_seed(3))
        if "attention_mask" in given:
            weight = weight * family.inputs()["attention_mask"][..., None]
        (states * weight).sum().backward()
    for (name, found), (_, wanted) in zip(
        model.named_parameters(), twin.named_parameters(), strict=True
    ):
        assert (found.grad is None) == (wanted.grad is None), name
        if found.grad is not None and wanted.grad is not None:
            largest = max(float(wanted.grad.abs().max()), 1.0)
            assert difference(found.grad, wanted.grad) < 1e-4 * largest, name
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert [str(x) for x in used_by(loaded)] == [str(x) for x in done.layers]
    assert difference(family.hidden(loaded), family.hidden(model)) < TOLERANCE


@pytest.mark.parametrize(("family", "beams"), checkered(WRITING, (1, 2), of=7), ids=str)
def test_writing_from_every_cache(family: Family, beams: int) -> None:
    # further back than the model's own windows, from a position, and to the first ones
    graph = "window(before = 5, after = 0) | block(size = 8) | columns(first(1))"
    kinds: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2 + ["full_attention"]}
    more = kinds if family.stem in ("Gemma2", "Gemma3Text", "GptOss") else {}
    if family.stem == "MiniMaxM3VLText":
        more = {"layer_types": ["minimax_m3_sparse"] * 3}
    head = "LMHeadModel" if family.stem == "GPT2" else "ForCausalLM"
    model = family.build("eager", head, num_hidden_layers=3, eos_token_id=None, **more)
    for layer in model.modules():
        if hasattr(layer, "sinks"):
            torch.nn.init.normal_(layer.sinks)
    ids, how = tokens(2, 9), {**GREEDY, "num_beams": beams}
    before = model.generate(ids, **how)
    score = score_of(CELLS[family.stem].replace("…", "2.0"))
    with convert(model, *specs_of(family, graph, score).values()):
        wanted = model.generate(ids, use_cache=False, **how)
        caches: list[dict[str, Any]] = [{}, {"past_key_values": SpecCache(model)}]
        for given in [*caches, *[STATIC] * (beams == 1)]:
            assert model.generate(ids, **given, **how).tolist() == wanted.tolist(), given
    assert model.generate(ids, **how).tolist() == before.tolist()


@pytest.mark.parametrize("family", KEEPING, ids=str)
def test_code_of_its_own_is_refused_wherever_a_spec_comes_from(family: Family) -> None:
    model, name = family.build(), named("attention nothing { attend self }")
    model.set_attn_implementation("eager")
    wanted, before = family.hidden(model), model.config._attn_implementation
    with pytest.raises(attnspec.AttnSpecError, match="in its own code"):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == before
    with pytest.raises(
        attnspec.AttnSpecError, match="in its own code; supported models: attnspec/integrations"
    ):
        convert(model, attnspec.parse(FULL))
    assert {layer.kind for layer in used_by(model)} == {"cannot"}
    # a config that was changed by hand, past every check: as before, or an error
    model.config._attn_implementation = name
    try:
        assert difference(family.hidden(model), wanted) == 0.0
    except (TypeError, ValueError) as error:
        assert "this layer computes attention in its own code" in str(error)  # noqa: PT017
    assert {layer.kind for layer in used_by(model)} == {"cannot"}


def test_models_that_inherit_or_contain_code_of_their_own_are_refused() -> None:
    deberta, model = BY_STEM["Deberta"].build(), BY_STEM["Bert"].build()
    own = type("Own", (type(deberta),), {})
    deberta.config._attn_implementation = named(FULL)
    with pytest.raises(attnspec.AttnSpecError, match="Own computes attention in its own code"):
        own(deberta.config)
    pair = type("Pair", (type(model),), {})(model.config)
    pair.second = BY_STEM["Deberta"].build()
    message = "DebertaModel computes attention in its own.*`convert` the parts that do ask"
    with pytest.raises(attnspec.AttnSpecError, match=message):
        pair.set_attn_implementation(named(FULL))


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
    assert [(x.path, x.kind) for x in used_by(model)] == [("own", "cannot"), ("asks", "spec")]
