"""A model that is there already is given a spec, in place, says what it reads, and gets its own
attention back. What each family reads then: test_families.py."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from model_families import BY_STEM, Family
from tiny_models import (
    FULL,
    IMAGES,
    TOLERANCE,
    bert,
    difference,
    hidden,
    llama,
    named,
    tiny,
    tokens,
)

import attnspec
from attnspec.integrations.transformers import convert, from_pretrained, used_by, with_inputs
from attnspec.testing import assert_attends

LAYERED = "attention layered { layers 2 attend full layer 1 { attend window(radius = 2) } }"
GRID = """attention cells { sequence grid(4, 4) extra_tokens COUNT layers 2
    attend neighborhood(3, 3) | global(first(COUNT))
    layer 1 { attend axial | columns(first(1)) } }"""
BAND = "attention band { cross attend where(abs(q - k) <= 2) }"
MONOTONIC = "attention monotonic { cross attend where(abs(q * n - k * m) <= 2 * m) }"


def biased(name: str, past: str = "", graph: str = "full", score: str = "") -> attnspec.Spec:
    score = score or "bias(buckets = 32, max_distance = 128)"
    return attnspec.parse(f"attention {name} {{ heads 4 {past} attend {graph} score {score} }}")


def test_undo_gives_back_what_was_there_before() -> None:
    model, ids = bert("eager"), tokens(2, 9)
    spec = attnspec.parse("attention near { attend window(radius = 1) }")
    before, wanted = hidden(model, ids), hidden(bert(named(spec.source)), ids)
    done = convert(model, spec)
    assert done.model is model
    assert difference(hidden(model, ids), wanted) == 0.0
    copied = deepcopy(model)
    with convert(model, attnspec.parse(LAYERED.replace("layers 2", "layers 3"))):
        assert difference(hidden(model, ids), wanted) > 0.01
    assert [layer.what for layer in used_by(model)] == [f"`near`, layer {x}" for x in range(3)]
    assert difference(hidden(copied, ids), wanted) == 0.0
    done.undo()
    done.undo()
    assert difference(hidden(model, ids), before) == 0.0
    assert {layer.kind for layer in used_by(model)} == {"dense"}


@pytest.mark.parametrize("stem", ["CLIPVision", "Dinov2", "DistilBert", "ViT", "Wav2Vec2"])
def test_layers_are_numbered_as_they_come(stem: str) -> None:
    family, spec = BY_STEM[stem], attnspec.parse(LAYERED)
    done = convert(family.build(), spec)
    assert [layer.what[-7:] for layer in done.layers] == ["layer 0", "layer 1"]
    assert_attends(done.model, spec, call=family.inputs())


@pytest.mark.parametrize(
    ("stem", "extra"), [("CLIPVision", 1), ("Dinov2", 1), ("Dinov2WithRegisters", 5), ("ViT", 1)]
)
def test_tokens_of_the_models_own_are_extra_tokens(stem: str, extra: int) -> None:
    family, spec = (
        Family(stem, stem, False, IMAGES),
        attnspec.parse(GRID.replace("COUNT", str(extra))),
    )
    with convert(model := family.build(), spec) as done:
        assert_attends(model, spec, call=family.inputs())
        assert f"`cells` at n = {16 + extra}" in str(done)
    for count in (0, extra + 1):
        text = GRID.replace("extra_tokens COUNT", f"extra_tokens {count}").replace("COUNT", "1")
        with pytest.raises(attnspec.AttnSpecError, match=f"write `extra_tokens {extra}`"):
            convert(model, attnspec.parse(text))
    # images are counted by their patches
    for patch in (4, 8):
        done = convert(family.build(patch_size=patch), attnspec.parse(FULL))
        assert f"`full_attention` at n = {(8 // patch) ** 2 + extra}\n" in str(done)


def test_padding_and_inputs_between_two_sequences_are_those_of_the_encoder() -> None:
    text = """attention marked { cross input important: tokens
        attend where(abs(q - k) <= 1) | columns(important) }"""
    spec, family = attnspec.parse(text), BY_STEM["Bart"]
    done = convert(model := family.build(), cross=spec)
    marks = {"important": torch.isin(torch.arange(13), torch.tensor([2, 12])).expand(3, -1)}
    paths = [layer.path for layer in done.layers if layer.kind == "spec"]
    with with_inputs(done, marks):
        assert_attends(model, spec, layers=paths, inputs=marks, call=family.inputs())


def test_a_decoder_cannot_write_where_the_number_of_queries_is_read() -> None:
    model = tiny("Bart", "ForConditionalGeneration", forced_eos_token_id=None)
    ids, given = tokens(2, 9), {"max_new_tokens": 4, "do_sample": False}
    with convert(model, cross=attnspec.parse(MONOTONIC)) as done:
        assert "`monotonic`, cross-attention with 64 queries and 64 keys" in str(done)
        with pytest.raises(ValueError, match="`monotonic` depends on m, the number of all queries"):
            model.generate(ids, **given)
        model.generate(ids, use_cache=False, **given)


def test_the_table_of_a_model_is_read_where_it_is() -> None:
    family = BY_STEM["T5"]
    model = family.build()
    wanted = family.hidden(model)
    done = convert(model, encoder=biased("enc"), decoder=biased("dec", "causal"))
    # no bias of n² numbers is written down, and a copy has a table of its own
    attention = model.encoder.block[0].layer[0].SelfAttention
    assert attention.compute_bias(99, 99).untyped_storage().nbytes() == 4
    copied = deepcopy(model)
    table = copied.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    torch.nn.init.normal_(table.weight, std=3.0)
    assert difference(family.hidden(copied), family.hidden(model)) > 0.01
    assert difference(family.hidden(model), wanted) < TOLERANCE
    with convert(model, encoder=biased("near", "", "window(radius = 1)")):
        assert difference(family.hidden(model), wanted) > 0.01
    done.undo()
    assert "compute_bias" not in vars(attention)
    assert difference(family.hidden(model), wanted) == 0.0


@pytest.mark.parametrize(
    ("body", "name", "rows"),
    [
        ("layers 3 heads 4 attend linformer(rank = 3, share = none)", "", 3),
        ("layers 3 heads 4 attend linformer(rank = 3, share = layer)", "", 1),
        ("heads 4 attend sinkhorn(size = 4)", "attnspec.sinkhorn_sort", 1),
        ("heads 4 attend cluster(count = 3, assign = balanced)", "attnspec.cluster_centroids", 1),
    ],
)
def test_learned_parts_belong_to_the_converted_model(
    body: str, name: str, rows: int, tmp_path: Path
) -> None:
    spec, ids = attnspec.parse(f"attention l {{ {body} }}"), tokens(2, 9)
    model = tiny("Bert", "ForMaskedLM", num_hidden_layers=3)
    keys = set(model.state_dict())
    done = convert(model, spec)
    own = {x.removeprefix("bert."): x for x in set(model.state_dict()) - keys}
    assert own
    assert not name or set(own) == {name}
    assert all(key.startswith("attnspec.") for key in own)
    before = {key: model.state_dict()[key].clone() for key in own.values()}
    hidden(model, ids)
    assert all(torch.equal(model.state_dict()[key], x) for key, x in before.items())
    model.train()
    model(ids).logits.square().sum().backward()
    for key, x in before.items():
        part = dict(model.named_parameters()).get(key)
        if part is None:
            # centroids have no gradient: they move
            assert not torch.equal(model.state_dict()[key], x)
            continue
        # each layer that has a row uses it
        assert part.shape[0] == rows
        assert part.grad is not None
        assert bool((part.grad.flatten(1).abs().sum(1) > 0).all())
    model.eval().save_pretrained(tmp_path)
    again = from_pretrained(tmp_path)
    assert type(again.model) is type(model)
    assert difference(hidden(again.model, ids), hidden(model, ids)) == 0.0
    assert difference(hidden(deepcopy(model), ids), hidden(model, ids)) == 0.0
    # another head finds what was learnt in the same place
    body_alone = from_pretrained(tmp_path, type(model.base_model)).model
    assert difference(hidden(body_alone, ids), hidden(model.base_model, ids)) == 0.0
    again.undo()
    assert not hasattr(again.model.config, "attnspec")
    done.undo()
    assert set(model.state_dict()) == keys


def test_learned_parts_need_a_place_of_their_own() -> None:
    model, spec = llama("eager"), biased("b", "causal", score="bias(buckets = 8)")
    convert(model, spec)
    with pytest.raises(attnspec.AttnSpecError, match=r"call `undo\(\)` of the earlier"):
        convert(model, biased("b", "causal", "self", "bias(buckets = 8)"))
    # a model that holds nothing cannot use the name of another
    family = BY_STEM["Bart"]
    model, other = family.build(), family.build()
    learnt = "attention b { cross attend linformer(rank = 3, max_length = 64) }"
    convert(model, cross=attnspec.parse(learnt))
    other.set_attn_implementation(model.config._attn_implementation)
    with pytest.raises(attnspec.AttnSpecError, match="has trainable parameters"):
        family.hidden(other)


def test_the_sides_of_a_model_are_saved_and_loaded(tmp_path: Path) -> None:
    family = BY_STEM["Bart"]
    model = family.build()
    bias = biased("b", score="bias(buckets = 8)")
    convert(model, encoder=bias, cross=attnspec.parse(BAND))
    torch.nn.init.normal_(model.encoder.attnspec.bias_0)
    model.save_pretrained(tmp_path)
    done = from_pretrained(tmp_path)
    assert difference(family.hidden(done.model), family.hidden(model)) < TOLERANCE
    assert [layer.what for layer in done.layers] == [layer.what for layer in used_by(model)]


def test_a_model_that_was_not_converted_is_not_loaded_as_one(tmp_path: Path) -> None:
    model = bert("eager")
    with convert(model, attnspec.parse(FULL)):
        assert model.config.attnspec["spec"].startswith("attention full_attention {")
    model.save_pretrained(tmp_path)
    with pytest.raises(attnspec.AttnSpecError, match="names no spec"):
        from_pretrained(tmp_path)
