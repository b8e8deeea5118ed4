"""A tiny random model of each family, and what comes of giving it a spec.

`python tests/model_families.py attnspec/integrations/README.md` writes the table of families anew.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
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
from attnspec.integrations.model_use import own_config, point
from attnspec.integrations.transformers import used_by

LENGTH = 13
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
        if self.stem in ("CLIPVision", "ViT"):
            return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}
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
    """What comes of a spec: "takes it", "with settings", "encoder alone" or "no"."""

    kind: str
    message: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


def outcome(family: Family) -> Outcome:
    """Gives a spec to a family and follows the advice that comes back, until it works or cannot.

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
        return Outcome("with settings", message, settings)
    if "convert(model.get_encoder(), spec)" in message:
        _require_working_encoder(family)
        return Outcome("encoder alone", message)
    return Outcome("no", message)


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


def _require_working_encoder(family: Family) -> None:
    wanted = family.hidden(family.build())
    full, sparse, defined = (family.build() for _ in range(3))
    spec = attnspec.parse(text_of(False, "window(radius = 2)"))
    point(full.get_encoder(), named(text_of(False, "full")))
    point(sparse.get_encoder(), named(text_of(False, "window(radius = 2)")))
    own_config(defined.get_encoder(), reference(lambda n, layer: spec.mask(n)))
    assert difference(_observed(family, full), wanted) < TOLERANCE
    assert difference(_observed(family, sparse), family.hidden(defined)) < TOLERANCE
    assert difference(family.hidden(sparse), wanted) > 0.01


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
    given = ModelAttention.__call__

    def noted(self: ModelAttention, module: Any, *arguments: Any, **settings: Any) -> Any:
        answer = given(self, module, *arguments, **settings)
        called.append(module)
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelAttention, "__call__", noted)
        yield called


HEAD = "| family | classes | |\n|---|---|---|"

_SAYS = {
    "takes it": "takes a spec",
    "with settings": "takes a spec when built with {}",
    "encoder alone": "`convert(model.get_encoder(), spec)`: the encoder alone",
    "no": "no",
}


def row(family: Family, found: Outcome) -> str:
    """What the page says of a family."""
    settings = ", ".join(_setting(name, value) for name, value in found.settings.items())
    says = _SAYS[found.kind].format(settings)
    if score_of(found.message):
        says += f", and `{score_of(found.message)}` in the spec".replace("= 2.0", "= …")
    if found.kind == "no":
        says += f": {reason_of(found.message)}"
    return f"| {family.title} | `{family.stem}…` | {says} |"


def _setting(name: str, value: Any) -> str:
    if name == "layer_types":
        return f'`{name} = ["{value[0]}"] * layers`'
    return f"`{name} = {value}`"


def reason_of(message: str) -> str:
    """Why a family cannot take a spec, in the words of the page."""
    if "code of its own" in message:
        return "computes attention in code of its own"
    found = re.search(r"a \w+ that it has learnt, added to every \w+", message)
    return f"its attention has {found[0]}" if found else message


def refreshed(page: str) -> str:
    """The page with its table written anew."""
    before, rest = page.split("<!-- families -->\n")
    _, after = rest.split("<!-- /families -->")
    with names_restored():
        rows = "\n".join(row(family, outcome(family)) for family in FAMILIES)
    return f"{before}<!-- families -->\n{HEAD}\n{rows}\n<!-- /families -->{after}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
