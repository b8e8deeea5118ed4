"""A tiny random model of each family, and what comes of giving it a spec.

`python tests/model_families.py attnspec/integrations/README.md` writes the table of families anew.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from choosing_models import MODELS
from tiny_models import (
    TOLERANCE,
    difference,
    named,
    names_restored,
    padded,
    reference,
    tokens,
    transformers,
)

import attnspec
from attnspec.integrations import model_use
from attnspec.integrations.model_attention import ModelAttention
from attnspec.integrations.model_layers import attention_layers
from attnspec.integrations.model_sides import CrossAttention
from attnspec.integrations.model_use import own_config
from attnspec.integrations.transformers import Conversion, convert, used_by

LENGTH = 13
_numbers = itertools.count()
PAGE = Path(__file__).parent.parent / model_use.PAGE

_VOCABULARY = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_COMMON = {**_VOCABULARY, "initializer_range": 0.2}
_STACK = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "initializer_range": 0.2,
}
_ENCODER = {**_COMMON, **_STACK, "max_position_embeddings": 40}
_DECODER = {**_ENCODER, "num_key_value_heads": 2}
_GEMMA = {**_DECODER, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
# low enough to be felt
_CAPPED = {**_GEMMA, "attn_logit_softcapping": 2.0}
_GPT = {**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 40}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_IMAGES = {**_STACK, "image_size": 8, "patch_size": 2}
_BOTH = {
    **_VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
    "init_std": 0.2,
}


def _choosing(name: str, **settings: Any) -> dict[str, Any]:
    """A model that chooses keys, of which it may read all here."""
    return {**MODELS[name][1], **settings}


@dataclass(frozen=True, eq=False)
class Family:
    """The stem of its classes in transformers, its name on the page, settings of a tiny config."""

    stem: str
    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.stem

    def build(self, attention: str = "eager", **settings: Any) -> Any:
        config = getattr(transformers, f"{self.stem}Config")(**{**self.settings, **settings})
        config._attn_implementation = attention
        torch.manual_seed(1)
        return getattr(transformers, f"{self.stem}Model")(config).eval()

    def inputs(self) -> dict[str, torch.Tensor]:
        """Three samples; texts are padded on the right."""
        generator = torch.Generator().manual_seed(5)
        ids, mask = tokens(3, LENGTH), padded(LENGTH, left=False)
        if self.stem in ("CLIPVision", "Dinov2", "ViT"):
            return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}
        if self.stem == "Wav2Vec2":
            return {"input_values": torch.randn(3, 60, generator=generator)}
        if self.stem == "Whisper":
            sound = torch.randn(3, 8, 24, generator=generator)
            return {"input_features": sound, "decoder_input_ids": ids}
        decoded = {"decoder_input_ids": ids} if self.stem in ("Bart", "LED", "T5") else {}
        return {"input_ids": ids, "attention_mask": mask, **decoded}

    def hidden(self, model: Any) -> torch.Tensor:
        """The hidden states at the end, those of padding set to 0."""
        given = self.inputs()
        with torch.no_grad():
            states = model(**given).last_hidden_state
        mask = given.get("attention_mask")
        return states if mask is None else states * mask[..., None]  # type: ignore[no-any-return]


FAMILIES = (
    Family("Albert", "ALBERT", {**_ENCODER, "embedding_size": 32}),
    Family("Bart", "BART", _BOTH),
    Family("Bert", "BERT", _ENCODER),
    Family("BigBird", "BigBird", _ENCODER),
    Family("Bloom", "BLOOM", {**_COMMON, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    Family("CLIPVision", "CLIP, images", _IMAGES),
    Family("Deberta", "DeBERTa", _ENCODER),
    Family("DebertaV2", "DeBERTa v2, v3", _ENCODER),
    Family("DeepseekV32", "DeepSeek V3.2", _choosing("DeepSeek V3.2", index_topk=40)),
    Family("Dinov2", "DINOv2", _IMAGES),
    Family(
        "DistilBert",
        "DistilBERT",
        {**_COMMON, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
    ),
    Family("Electra", "ELECTRA", {**_ENCODER, "embedding_size": 32}),
    Family("Falcon", "Falcon", {**_COMMON, **_STACK}),
    Family(
        "Funnel",
        "Funnel",
        {
            "vocab_size": 61,
            "block_sizes": [1, 1],
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 48,
        },
    ),
    Family("Gemma", "Gemma", {**_DECODER, "head_dim": 8}),
    Family("Gemma2", "Gemma 2", _CAPPED),
    Family("Gemma3Text", "Gemma 3, text", _GEMMA),
    Family("GPT2", "GPT-2", _GPT),
    Family("GPTJ", "GPT-J", {**_GPT, "rotary_dim": 4}),
    Family(
        "GPTNeo",
        "GPT-Neo",
        {
            **_COMMON,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
        },
    ),
    Family("GPTNeoX", "GPT-NeoX", _ENCODER),
    Family(
        "GptOss",
        "GPT-OSS",
        {**_DECODER, **_EXPERTS, "head_dim": 8, "sliding_window": 4},
    ),
    Family("LED", "LED", {**_BOTH, "attention_window": 4}),
    Family("Llama", "Llama", _DECODER),
    Family("Longformer", "Longformer", {**_ENCODER, "attention_window": [4, 4]}),
    Family("MiniMaxM3VLText", "MiniMax M3", _choosing("MiniMax M3", index_topk_blocks=9)),
    Family("Mistral", "Mistral", {**_DECODER, "sliding_window": 4}),
    Family("Mixtral", "Mixtral", {**_DECODER, **_EXPERTS}),
    Family("ModernBert", "ModernBERT", {**_ENCODER, "local_attention": 8}),
    Family("MPNet", "MPNet", _ENCODER),
    Family("Mpt", "MPT", {**_COMMON, "d_model": 32, "n_layers": 2, "n_heads": 4}),
    Family(
        "OPT",
        "OPT",
        {**_ENCODER, "ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2},
    ),
    Family("Phi3", "Phi 3", _DECODER),
    Family("Qwen2", "Qwen 2", _DECODER),
    Family("Qwen3", "Qwen 3", {**_DECODER, "head_dim": 8}),
    Family("Roberta", "RoBERTa", _ENCODER),
    Family(
        "T5",
        "T5",
        {
            "vocab_size": 61,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    Family("ViT", "ViT", _IMAGES),
    Family(
        "Wav2Vec2",
        "wav2vec2",
        {
            **_STACK,
            "conv_dim": [8, 8],
            "conv_kernel": [3, 3],
            "conv_stride": [2, 2],
            "num_conv_pos_embeddings": 4,
            "num_conv_pos_embedding_groups": 2,
        },
    ),
    Family(
        "Whisper",
        "Whisper",
        {
            **_BOTH,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "max_target_positions": 40,
        },
    ),
    Family("XLNet", "XLNet", {"vocab_size": 61, "d_model": 32, "n_layer": 2, "n_head": 4}),
)


@dataclass(frozen=True)
class Outcome:
    """What comes of a spec: "takes it", "with settings", "converted" (only then) or "no"; what was
    said, the settings that it asked for, and the score that stands in the spec."""

    kind: str
    message: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    score: str = ""


def outcome(family: Family) -> Outcome:
    """Gives a spec to a family as it is built and follows the advice that comes back, until it
    works or cannot.

    What works is held against the model's own attention, and a window against its definition.
    """
    dense = family.build()
    causal = all(getattr(module, "is_causal", False) for _, module in attention_layers(dense))
    try:
        _require_working(family, causal)
        return Outcome("takes it")
    except attnspec.AttnSpecError as error:
        message = str(error)
    settings, score = settings_of(message), score_of(message)
    if settings:
        _require_working(family, causal, settings, score)
        return Outcome("with settings", message, settings, score)
    return Outcome("converted" if "`convert(model, encoder=" in message else "no", message)


def converted(family: Family) -> Outcome:
    """Gives a spec to a model of a family that is there already, and follows the advice that comes
    back; what works is held against definitions, and what is undone against the model before."""
    try:
        _require_converted(family)
        return Outcome("takes it")
    except attnspec.AttnSpecError as error:
        message, score = str(error), score_of(str(error))
    if not score:
        return Outcome("no", message)
    # a table for each head needs to know how many there are
    _require_converted(family, f"heads 4 {score}" if "bias" in score else score)
    return Outcome("takes it", message, score=score)


def _require_converted(family: Family, score: str = "") -> None:
    """Raises where a spec is refused, and fails where it computes anything else."""
    model = family.build()
    wanted = family.hidden(model)
    cap = float(score.rstrip(")").split()[-1]) if "softcap" in score else None
    states = []
    for graph in ("full", "window(radius = 2)"):
        defined = family.build()
        specs = _specs(model, graph, score)
        for side in specs.keys() - {"cross"}:
            part = defined if side == "whole" else getattr(defined, f"get_{side}")()
            own_config(part, _defined(specs, side, cap))
        with _given(model, specs) as done:
            states.append(_observed(family, model))
            assert difference(states[-1], family.hidden(defined)) < TOLERANCE
            whole = graph == "full" and "in place of" not in str(done)
        if whole:
            assert difference(states[-1], wanted) < TOLERANCE
        assert difference(family.hidden(model), wanted) == 0.0
    assert difference(*states) > 0.01


def _specs(model: Any, graph: str, score: str) -> dict[str, attnspec.Spec]:
    """The specs of the sides of a model, or of the whole."""
    if model.config.is_encoder_decoder:
        sides = {"encoder": "", "decoder": "causal", "cross": "cross"}
    else:
        layers = attention_layers(model)
        past = all(getattr(x, "is_causal", False) for _, x in layers)
        sides = {"whole": "causal" * past}
    texts = {
        # a layer that reads the encoder has no bias
        side: text_of(False, graph, "" if side == "cross" else score).replace("{", f"{{ {word}", 1)
        for side, word in sides.items()
    }
    return {
        side: attnspec.parse(text.replace("tried", f"{side}_{next(_numbers)}"))
        for side, text in texts.items()
    }


def _given(model: Any, specs: Mapping[str, Any]) -> Conversion:
    return convert(model, specs["whole"]) if "whole" in specs else convert(model, **specs)


def _defined(specs: Mapping[str, attnspec.Spec], side: str, cap: float | None) -> str:
    spec, cross = specs[side], specs.get("cross")
    across = None if cross is None else lambda m, n: cross.mask(n, m=m)
    return reference(lambda n, layer: spec.mask(n), cap=cap, across=across)


def settings_of(message: str) -> dict[str, Any]:
    """The settings of a config that a message advises, "`name = value`"."""
    found = re.findall(r"`([a-z_]+) = ([^`]+)`", message)
    return {name: _value(text) for name, text in found}


def score_of(message: str) -> str:
    """The score that a message advises to write into the spec, or nothing."""
    found = re.search(r"`(score [^`]+)`", message)
    return found[1] if found else ""


def _value(text: str) -> Any:
    """A literal, or a list of one times a number."""
    literal, _, times = text.partition(" * ")
    value = ast.literal_eval(literal)
    return value * int(times) if times else value


def text_of(causal: bool, graph: str, score: str = "") -> str:
    return f"attention tried {{ {'causal ' if causal else ''}attend {graph} {score} }}"


def _require_working(
    family: Family, causal: bool, settings: Mapping[str, Any] | None = None, score: str = ""
) -> None:
    """Raises where the spec is refused, and fails where it computes anything else."""
    changed = dict(settings or {})
    # a cap of the model's own is what the score of the spec stands for
    own = {name: value for name, value in changed.items() if name != "attn_logit_softcapping"}
    wanted = family.hidden(family.build("eager", **own))
    full = text_of(causal, "full", score)
    assert difference(_observed(family, family.build(named(full), **changed)), wanted) < TOLERANCE
    window = text_of(causal, "window(radius = 2)", score)
    sparse = _observed(family, family.build(named(window), **changed))
    cap = float(score.rstrip(")").split()[-1]) if score else None
    spec = attnspec.parse(window)
    defined = family.build(reference(lambda n, layer: spec.mask(n), cap=cap), **changed)
    assert difference(sparse, family.hidden(defined)) < TOLERANCE
    assert difference(sparse, wanted) > 0.01


def _observed(family: Family, model: Any) -> torch.Tensor:
    """The hidden states; fails unless `used_by` names just the layers that then call their spec."""
    with observed() as called:
        states = family.hidden(model)
    said = [layer.path for layer in used_by(model) if layer.kind == "spec"]
    assert said == [path for path, module in attention_layers(model) if module in called]
    assert said
    return states


@contextmanager
def observed() -> Iterator[list[Any]]:
    """The modules that call a spec within and are answered, in order."""
    called: list[Any] = []

    def noting(given: Any) -> Any:
        def noted(self: ModelAttention, module: Any, *arguments: Any, **settings: Any) -> Any:
            answer = given(self, module, *arguments, **settings)
            called.append(module)
            return answer

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for kind in (ModelAttention, CrossAttention):
            patch.setattr(kind, "__call__", noting(vars(kind)["__call__"]))
        yield called


HEAD = """| family | classes | `attn_implementation = name` | `convert(model, spec)` |
|---|---|---|---|"""


def row(family: Family, built: Outcome, there: Outcome) -> str:
    """What the page says of a family: of models that are built with a spec, and that are there."""
    works = "works: `encoder=`, `decoder=`, `cross=`" if built.kind == "converted" else "works"
    return f"| {family.title} | `{family.stem}…` | {_built(built)} | {_there(there, works)} |"


def _built(found: Outcome) -> str:
    if found.kind == "takes it":
        return "works"
    if found.kind == "converted":
        return "no: convert it"
    if found.kind == "no":
        return f"no: {reason_of(found.message)}"
    settings = ", ".join(_setting(name, value) for name, value in found.settings.items())
    return f"works with {settings}{_scored(found.score)}"


def _there(found: Outcome, works: str) -> str:
    if found.kind == "no":
        return f"no: {reason_of(found.message)}"
    return f"{works}{_scored(found.score)}"


def _scored(score: str) -> str:
    return f", with `{score}` in the spec".replace("= 2.0", "= …") if score else ""


def _setting(name: str, value: Any) -> str:
    if name == "layer_types":
        return f'`{name} = ["{value[0]}"] * layers`'
    return f"`{name} = {value}`"


def reason_of(message: str) -> str:
    """Why a family cannot take a spec, in the words of the page."""
    if "code of its own" in message or "in its own code" in message:
        return "computes attention in code of its own"
    return message


def refreshed(page: str) -> str:
    """The page with its table written anew."""
    before, rest = page.split("<!-- families -->\n")
    _, after = rest.split("<!-- /families -->")
    with names_restored():
        rows = "\n".join(row(x, outcome(x), converted(x)) for x in FAMILIES)
    return f"{before}<!-- families -->\n{HEAD}\n{rows}\n<!-- /families -->{after}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
