"""A model that is there already is given a spec, in place, says what it reads, and gets its own
attention back. Windows, caps and sides of every family: test_model_families.py."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_families import FAMILIES, Family
from tiny_models import (
    CAUSAL,
    FULL,
    TOLERANCE,
    bert,
    difference,
    hidden,
    llama,
    named,
    names_restored,
    padded,
    reference,
    tokens,
    transformers,
)

import attnspec
from attnspec.integrations.model_layers import attention_layers
from attnspec.integrations.model_sides import CrossAttention, SidesAttention
from attnspec.integrations.model_use import own_config
from attnspec.integrations.transformers import (
    SpecCache,
    convert,
    from_pretrained,
    register,
    used_by,
    with_inputs,
)

BY_STEM = {family.stem: family for family in FAMILIES}
LAYERED = """attention layered { layers 2 attend full layer 1 { attend window(radius = 2) } }"""
GRID = """attention cells { sequence grid(4, 4) extra_tokens COUNT layers 2
    attend neighborhood(3, 3) | global(first(COUNT))
    layer 1 { attend axial | columns(first(1)) } }"""
BIASED = "attention NAME { heads 4 PAST attend GRAPH score bias(buckets = 32, max_distance = 128) }"


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


def defined(model: Any, spec: attnspec.Spec) -> Any:
    """The model with the spec's definition in every layer, these numbered as they come."""
    for number, (_, module) in enumerate(attention_layers(model)):
        module.layer_idx = number  # type: ignore[assignment]
    own_config(model, reference(lambda n, layer: spec.mask(n, layer)))
    return model


# --- there and back ---------------------------------------------------------------------------


def test_convert_switches_a_model_and_undo_switches_it_back() -> None:
    model, ids = bert("eager"), tokens(2, 9)
    spec = attnspec.parse("attention near { attend window(radius = 1) }")
    before, wanted = hidden(model, ids), hidden(bert(named(spec.source)), ids)
    done = convert(model, spec)
    assert done.model is model
    assert difference(hidden(model, ids), wanted) == 0.0
    assert {layer.kind for layer in done.layers} == {"spec"}
    done.undo()
    done.undo()
    assert difference(hidden(model, ids), before) == 0.0
    assert {layer.kind for layer in used_by(model)} == {"dense"}
    with pytest.raises(TypeError, match="a model is needed, got str"):
        used_by("bert")  # type: ignore[arg-type]
    with convert(model, spec):
        assert difference(hidden(model, ids), wanted) == 0.0
    assert difference(hidden(model, ids), before) == 0.0


def test_what_is_converted_can_be_converted_again_and_copied() -> None:
    model, ids = bert("eager"), tokens(2, 9)
    convert(model, attnspec.parse("attention one { attend self }"))
    convert(model, attnspec.parse(FULL))
    copied = deepcopy(model)
    assert difference(hidden(model, ids), hidden(bert("eager"), ids)) < TOLERANCE
    layered = attnspec.parse("attention three { layers 3 attend full }")
    with convert(model, layered):
        pass
    # what was there before is there again
    assert [layer.what for layer in used_by(model)] == [
        f"`full_attention`, layer {layer}" for layer in range(3)
    ]
    family = BY_STEM["T5"]
    twice = family.build()
    convert(twice, encoder=biased("full_bias"))
    wanted = family.hidden(twice)
    with convert(twice, encoder=biased("near_bias", "", "window(radius = 1)")):
        assert difference(family.hidden(twice), wanted) > 0.01
    assert difference(family.hidden(twice), wanted) == 0.0
    assert difference(hidden(copied, ids), hidden(model, ids)) == 0.0


def test_the_report_counts_what_each_head_reads() -> None:
    text = """attention few { layers 3 heads 4 attend window(radius = 1)
        layer 1 { head 2..3 { attend columns(first(2)) } } }"""
    spec = attnspec.parse(text)
    done = convert(bert("eager"), spec)
    report = spec.analyse(40)
    first, other = report.per_head[0, 0], report.per_head[1, 3]
    assert str(done).splitlines()[-3:] == [
        "`few` at n = 40",
        f"  layer 0, 2 every head, layer 1 head 0..1: {first.edges:,} pairs, at most 3 keys of a"
        f" query, {first.density:.3g} of all",
        f"  layer 1 head 2..3: {other.edges:,} pairs, at most 2 keys of a query,"
        f" {other.density:.3g} of all",
    ]
    assert f"{spec.analyse(7).per_head[0, 0].edges} pairs" in done.report(7)
    marked = attnspec.parse("attention m { input x: tokens attend columns(x) }")
    assert "input" in str(convert(bert("eager"), marked)).splitlines()[-1]


def test_convert_leaves_a_model_as_it_was_where_it_cannot() -> None:
    model = BY_STEM["Bart"].build()
    before = [module.config for module in model.modules() if hasattr(module, "config")]
    with pytest.raises(attnspec.AttnSpecError, match="gives specs to the encoder and the decoder"):
        convert(model, attnspec.parse(CAUSAL))
    # the encoder can, the decoder cannot: neither does
    with pytest.raises(attnspec.AttnSpecError, match="must not read the future"):
        convert(model, encoder=attnspec.parse(FULL), decoder=attnspec.parse(FULL))
    after = [module.config for module in model.modules() if hasattr(module, "config")]
    assert all(a is b for a, b in zip(after, before, strict=True))
    assert {layer.kind for layer in used_by(model)} == {"dense"}


def test_convert_needs_what_makes_its_own_masks() -> None:
    with pytest.raises(attnspec.AttnSpecError, match="a PreTrainedModel, got BertLayer"):
        convert(bert("eager").encoder.layer[0], attnspec.parse(FULL))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "a spec is needed"),
        ({"spec": FULL, "encoder": FULL}, "either one spec, or some of `encoder`, `decoder`"),
        ({"encoder": FULL}, "a model with an encoder and a decoder is needed for `encoder=`"),
    ],
)
def test_sides_are_for_models_that_have_them(given: dict[str, str], message: str) -> None:
    specs: dict[str, Any] = {name: attnspec.parse(text) for name, text in given.items()}
    with pytest.raises(attnspec.AttnSpecError, match=message):
        convert(bert("eager"), **specs)


# --- a decoder that reads an encoder ----------------------------------------------------------

BAND = "attention band { cross attend where(abs(q - k) <= 2) }"
MONOTONIC = "attention monotonic { cross attend where(abs(q * n - k * m) <= 2 * m) }"


def writer() -> Any:
    config = transformers.BartConfig(**BY_STEM["Bart"].settings, forced_eos_token_id=None)
    torch.manual_seed(1)
    return transformers.BartForConditionalGeneration(config).eval()


def test_a_decoder_writes_beside_the_keys_of_the_encoder() -> None:
    model, ids = writer(), tokens(2, 9)
    given: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    dense = model.generate(ids, **given)
    with convert(model, cross=attnspec.parse(BAND)) as done:
        assert "`band` at m = n = 1024" in str(done)
        wanted = model.generate(ids, use_cache=False, **given)
        assert wanted.tolist() != dense.tolist()
        for beams in (1, 2):
            found, whole = (
                model.generate(ids, use_cache=cached, num_beams=beams, **given)
                for cached in (True, False)
            )
            assert found.tolist() == whole.tolist()
    assert model.generate(ids, **given).tolist() == dense.tolist()


def test_a_decoder_cannot_write_where_the_number_of_queries_is_read() -> None:
    model, ids = writer(), tokens(2, 9)
    convert(model, cross=attnspec.parse(MONOTONIC))
    with pytest.raises(ValueError, match="`monotonic` reads m, the number of all queries"):
        model.generate(ids, max_new_tokens=4, do_sample=False)
    model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False)


def test_padding_and_inputs_between_two_sequences_are_those_of_the_encoder() -> None:
    text = """attention marked { cross input important: tokens
        attend where(abs(q - k) <= 1) | columns(important) }"""
    spec, family = attnspec.parse(text), BY_STEM["Bart"]
    model, definition = family.build(), family.build()
    important = torch.zeros(13, dtype=torch.bool)
    important[[2, 12]] = True
    done = convert(model, cross=spec)
    marks = {"important": important.numpy()}
    across = reference(
        lambda n, layer: np.tril(np.ones((n, n), bool)),
        across=lambda m, n: spec.mask(n, m=m, inputs=marks),
    )
    own_config(definition.get_decoder(), across)
    with with_inputs(done, {"important": important.expand(3, -1)}):
        found = family.hidden(model)
    assert difference(found, family.hidden(definition)) < TOLERANCE


@pytest.mark.parametrize(
    ("side", "text", "message"),
    [
        ("cross", FULL, "is one within a single sequence: write `cross`"),
        ("decoder", BAND, r"`convert\(model, cross=spec\)` gives"),
        ("cross", "attention h { cross heads 3 attend full }", "write `heads 4`"),
    ],
)
def test_sides_take_specs_of_their_kind(side: str, text: str, message: str) -> None:
    given: dict[str, Any] = {side: attnspec.parse(text)}
    with pytest.raises(attnspec.AttnSpecError, match=message):
        convert(BY_STEM["Bart"].build(), **given)


def test_a_model_that_holds_nothing_cannot_read_an_encoder_by_what_is_learnt() -> None:
    family = BY_STEM["Bart"]
    model, other = family.build(), family.build()
    convert(
        model,
        cross=attnspec.parse("attention b { cross attend linformer(rank = 3, max_length = 64) }"),
    )
    other.set_attn_implementation(model.config._attn_implementation)
    with pytest.raises(attnspec.AttnSpecError, match="an attention without learned parts"):
        family.hidden(other)


# --- layers, windows, class tokens ------------------------------------------------------------


@pytest.mark.parametrize("stem", ["CLIPVision", "Dinov2", "DistilBert", "ViT", "Wav2Vec2"])
def test_layers_are_numbered_as_they_come(stem: str) -> None:
    family, spec = BY_STEM[stem], attnspec.parse(LAYERED)
    model = family.build()
    done = convert(model, spec)
    assert [layer.what[-7:] for layer in done.layers] == ["layer 0", "layer 1"]
    assert (
        difference(family.hidden(model), family.hidden(defined(family.build(), spec))) < TOLERANCE
    )
    turned = attnspec.parse(LAYERED.replace("layer 1", "layer 0"))
    assert difference(family.hidden(model), family.hidden(defined(family.build(), turned))) > 0.01


def test_one_module_that_serves_several_layers_has_no_number() -> None:
    with pytest.raises(attnspec.AttnSpecError, match="leave `layers` out"):
        convert(BY_STEM["Albert"].build(), attnspec.parse(LAYERED))


def test_each_side_is_counted_at_its_own_length() -> None:
    model = BY_STEM["Whisper"].build()
    encoder, decoder, cross = (attnspec.parse(text) for text in (FULL, CAUSAL, BAND))
    done = convert(model, encoder=encoder, decoder=decoder, cross=cross)
    lengths = [line for line in str(done).splitlines() if line.startswith("`")]
    assert lengths == ["`full_attention` at n = 12", "`past` at n = 40", "`band` at m = n = 12"]


def test_layers_of_the_sides_are_counted_apart() -> None:
    family = Family("Bart", "BART", {**BY_STEM["Bart"].settings, "decoder_layers": 3})
    model = family.build()
    wrong = attnspec.parse("attention w { layers 2 causal attend full }")
    with pytest.raises(attnspec.AttnSpecError, match="write `layers 3`"):
        convert(model, decoder=wrong)
    right = attnspec.parse("attention r { layers 3 causal attend full layer 2 { attend self } }")
    convert(model, encoder=attnspec.parse(LAYERED), decoder=right)
    assert [x.what for x in used_by(model) if x.kind == "spec"] == [
        *(f"`layered`, layer {layer}" for layer in range(2)),
        *(f"`r`, layer {layer}" for layer in range(3)),
    ]


@pytest.mark.parametrize(
    ("stem", "extra"), [("CLIPVision", 1), ("Dinov2", 1), ("Dinov2WithRegisters", 5), ("ViT", 1)]
)
def test_tokens_of_the_models_own_are_extra_tokens(stem: str, extra: int) -> None:
    family = Family(stem, stem, BY_STEM["ViT"].settings)
    pixels = {"pixel_values": torch.randn(3, 3, 8, 8)}
    spec = attnspec.parse(GRID.replace("COUNT", str(extra)))
    model, definition = family.build(), defined(family.build(), spec)
    with torch.no_grad():
        done = convert(model, spec)
        found, wanted = (x(**pixels).last_hidden_state for x in (model, definition))
        assert difference(found, wanted) < TOLERANCE
        assert f"`cells` at n = {16 + extra}" in str(done)
        done.undo()
        assert difference(model(**pixels).last_hidden_state, wanted) > 0.01
    for count in (0, extra + 1):
        text = GRID.replace("extra_tokens COUNT", f"extra_tokens {count}").replace("COUNT", "1")
        with pytest.raises(attnspec.AttnSpecError, match=f"write `extra_tokens {extra}`"):
            convert(model, attnspec.parse(text))


@pytest.mark.parametrize("patch", [2, 4, 8])
@pytest.mark.parametrize("stem", ["CLIPVision", "Dinov2WithRegisters", "ViT"])
def test_images_are_counted_by_their_patches(stem: str, patch: int) -> None:
    family = Family(stem, stem, {**BY_STEM["ViT"].settings, "patch_size": patch})
    model = family.build()
    with torch.no_grad():
        length = model(pixel_values=torch.randn(1, 3, 8, 8)).last_hidden_state.shape[1]
    assert f"`full_attention` at n = {length}\n" in str(convert(model, attnspec.parse(FULL)))


def test_a_model_of_text_has_no_tokens_of_its_own() -> None:
    spec = attnspec.parse("attention e { extra_tokens 2 attend full }")
    with pytest.raises(attnspec.AttnSpecError, match="the model has no rows for them"):
        convert(bert("eager"), spec)


def test_windows_are_replaced_and_rotations_kept() -> None:
    # layers with windows turn positions by a base of their own, and still do
    family, spec = BY_STEM["Gemma3Text"], attnspec.parse("attention c { causal attend full }")
    model, definition = family.build(), defined(family.build(), spec)
    done = convert(model, spec)
    assert "in place of sliding_attention in 2 layers" in str(done)
    assert difference(family.hidden(model), family.hidden(definition)) < TOLERANCE
    plain = family.build(layer_types=["full_attention"] * 2)
    assert difference(family.hidden(model), family.hidden(plain)) > 0.01


def test_a_cap_must_be_that_of_the_model() -> None:
    for score in ("", "score softcap(cap = 3)"):
        spec = attnspec.parse(f"attention g{len(score)} {{ causal attend full {score} }}")
        with pytest.raises(attnspec.AttnSpecError, match=r"write `score softcap\(cap = 2.0\)`"):
            convert(BY_STEM["Gemma2"].build(), spec)


# --- what is learnt ---------------------------------------------------------------------------


def biased(name: str, past: str = "", graph: str = "full") -> attnspec.Spec:
    text = BIASED.replace("NAME", name).replace("PAST", past).replace("GRAPH", graph)
    return attnspec.parse(text)


def test_the_table_of_a_model_is_read_trained_and_saved_as_it_was() -> None:
    family = BY_STEM["T5"]
    model, twin = family.build(), family.build()
    keys = list(model.state_dict())
    done = convert(model, encoder=biased("enc"), decoder=biased("dec", "causal"))
    assert list(model.state_dict()) == keys
    weight = torch.randn(3, 13, 32)
    for each in (model, twin):
        (each(**family.inputs()).last_hidden_state * weight).sum().backward()
    for side in ("encoder", "decoder"):
        name = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        found, wanted = (each.get_parameter(name).grad for each in (model, twin))
        assert wanted.abs().max() > 0.1
        assert difference(found, wanted) < 1e-4 * float(wanted.abs().max())
    # no bias of n² numbers is written down, and a copy has a table of its own
    attention = model.encoder.block[0].layer[0].SelfAttention
    assert attention.compute_bias(99, 99).untyped_storage().nbytes() == 4
    copied = deepcopy(model)
    table = copied.encoder.block[0].layer[0].SelfAttention.relative_attention_bias
    torch.nn.init.normal_(table.weight, std=3.0)
    assert difference(family.hidden(copied), family.hidden(model)) > 0.01
    assert difference(family.hidden(model), family.hidden(twin)) < TOLERANCE
    done.undo()
    assert "compute_bias" not in vars(attention)
    assert difference(family.hidden(model), family.hidden(twin)) == 0.0


@pytest.mark.parametrize(
    "score", ["bias(buckets = 16, max_distance = 128)", "bias() score alibi()", "softcap(cap = 3)"]
)
def test_a_bias_must_be_that_of_the_model(score: str) -> None:
    spec = attnspec.parse(f"attention w {{ heads 4 attend full score {score} }}")
    with pytest.raises(attnspec.AttnSpecError, match=r"must be the model's: write `score bias\("):
        convert(BY_STEM["T5"].build(), encoder=spec)


def test_a_sparse_t5_generates_as_the_whole_pass() -> None:
    settings = {**BY_STEM["T5"].settings, "eos_token_id": None}
    torch.manual_seed(1)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**settings)).eval()
    near, recent = "window(radius = 3)", "window(before = 3, after = 0)"
    convert(model, encoder=biased("near", "", near), decoder=biased("recent", "causal", recent))
    given: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    ids, mask = tokens(3, 13), padded(13, left=False)
    found = model.generate(ids, attention_mask=mask, **given)
    wanted = model.generate(ids, attention_mask=mask, use_cache=False, **given)
    assert found.tolist() == wanted.tolist()
    cache: Any = SpecCache(model.get_decoder())
    both = transformers.EncoderDecoderCache(cache, transformers.DynamicCache())
    found = model.generate(ids, attention_mask=mask, past_key_values=both, **given)
    assert found.tolist() == wanted.tolist()


LINFORMER = "attention l { layers 3 heads 4 attend linformer(rank = 3, share = none) }"


def test_what_a_spec_learns_is_a_part_of_the_model() -> None:
    spec, ids = attnspec.parse(LINFORMER), tokens(2, 9)
    with pytest.raises(
        attnspec.AttnSpecError, match=r"`convert\(model, spec\)` has the model hold"
    ):
        register(spec)
    model = bert("eager")
    keys = set(model.state_dict())
    done = convert(model, spec)
    own = set(model.state_dict()) - keys
    assert own
    assert all(key.startswith("attnspec.") for key in own)
    model(ids).last_hidden_state.square().sum().backward()
    parts = {name: part for name, part in model.named_parameters() if name in own}
    # one row for each of the layers, and each layer uses its own
    assert all(part.shape[0] == 3 for part in parts.values())
    for part in parts.values():
        assert part.grad is not None
        assert bool((part.grad.flatten(1).abs().sum(1) > 0).all())
    other = bert("eager")
    torch.manual_seed(5)
    convert(other, spec)
    assert difference(hidden(other, ids), hidden(model, ids)) > 0.001
    other.load_state_dict(model.state_dict())
    assert difference(hidden(other, ids), hidden(model, ids)) == 0.0
    assert difference(hidden(deepcopy(model), ids), hidden(model, ids)) == 0.0
    done.undo()
    assert set(model.state_dict()) == keys


@pytest.mark.parametrize(
    ("graph", "name"),
    [
        ("sinkhorn(size = 4)", "attnspec.sinkhorn_sort"),
        ("cluster(count = 3, assign = balanced)", "attnspec.cluster_centroids"),
    ],
)
def test_what_decides_is_held_by_the_model_and_learns(graph: str, name: str) -> None:
    model, ids = bert("eager"), tokens(2, 9)
    keys = set(model.state_dict())
    convert(model, attnspec.parse(f"attention a {{ heads 4 attend {graph} }}"))
    assert set(model.state_dict()) - keys == {name}
    before = model.state_dict()[name].clone()
    model(ids)
    assert torch.equal(model.state_dict()[name], before)
    model.train()
    model(ids).last_hidden_state.square().sum().backward()
    part = dict(model.named_parameters()).get(name)
    if part is None:
        # centroids have no gradient: they move
        assert not torch.equal(model.state_dict()[name], before)
    else:
        assert part.grad is not None
        assert part.grad.abs().max() > 0
    other = bert("eager")
    convert(other, attnspec.parse(f"attention a {{ heads 4 attend {graph} }}"))
    other.load_state_dict(model.state_dict())
    assert difference(hidden(other.eval(), ids), hidden(model.eval(), ids)) == 0.0


def test_a_second_spec_that_learns_needs_the_first_undone() -> None:
    model = llama("eager")
    text = "attention b { causal heads 4 attend full score bias(buckets = 8) }"
    convert(model, attnspec.parse(text))
    with pytest.raises(attnspec.AttnSpecError, match=r"`undo\(\)` what it was given before"):
        convert(model, attnspec.parse(text.replace("full", "self")))


@pytest.mark.parametrize("share", ["none", "layer"])
def test_what_a_spec_learns_is_saved_and_loaded(share: str, tmp_path: Path) -> None:
    text = LINFORMER.replace("share = none", f"share = {share}")
    config = transformers.BertConfig(**{**BY_STEM["Bert"].settings, "num_hidden_layers": 3})
    torch.manual_seed(1)
    model, ids = transformers.BertForMaskedLM(config).eval(), tokens(2, 9)
    convert(model, attnspec.parse(text))
    model.save_pretrained(tmp_path)
    done = from_pretrained(tmp_path)
    assert type(done.model) is type(model)
    assert {layer.kind for layer in done.layers} == {"spec"}
    assert difference(hidden(done.model, ids), hidden(model, ids)) == 0.0
    # another head finds what was learnt in the same place
    body = from_pretrained(tmp_path, transformers.BertModel).model
    assert difference(hidden(body, ids), hidden(model.base_model, ids)) == 0.0
    done.undo()
    assert not hasattr(done.model.config, "attnspec")
    assert not any("attnspec" in key for key in done.model.state_dict())


def test_the_sides_of_a_model_are_saved_and_loaded(tmp_path: Path) -> None:
    family = BY_STEM["Bart"]
    model = family.build()
    bias = attnspec.parse("attention b { heads 4 attend full score bias(buckets = 8) }")
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
    with pytest.raises(attnspec.AttnSpecError, match="a model that was converted to a spec"):
        from_pretrained(tmp_path)


def test_queries_whose_own_sequence_nobody_has_read_stand_at_its_beginning() -> None:
    cross = attnspec.parse("attention a { cross attend window(radius = 1) }").compile()
    sides = SidesAttention(None, CrossAttention(cross))
    assert sides._started() == 0
