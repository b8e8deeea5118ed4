"""A tiny random model of each family, and what comes of giving it a spec.

`python tests/model_families.py attnspec/integrations/README.md` writes the table of families anew.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_models import IMAGES, TOLERANCE, difference, named, names_restored, padded, tiny, tokens
from torch import Tensor

import attnspec
from attnspec.integrations.transformers import convert, used_by
from attnspec.testing import assert_attends

N = 13
PAGE = Path(__file__).resolve().parents[1] / "attnspec" / "integrations" / "README.md"
OWN_CODE = "no: computes attention in code of its own"
_numbers = itertools.count()

_LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "v_head_dim": 16},
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **{"num_experts_per_tok": 2, "index_topk": 5, "index_head_dim": 16, "index_n_heads": 2},
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
CHOOSING: Mapping[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek V3.2": ("DeepseekV32", {**_LATENT, "head_dim": 8}),
    "HY 4": ("HYV4", {**_LATENT, "head_dim": 16}),
    "GLM 5.3": (
        "Glm5NextText",
        {
            **{**_LATENT, "qk_rope_head_dim": 0, "qk_nope_head_dim": 16, "index_kpool": 2},
            **{"index_topk": 6, "layer_types": ["indexed_attention"] * 2},
        },
    ),
    "MiniMax M3": (
        "MiniMaxM3VLText",
        {
            **{**_GROUPED, "rotary_dim": 8, "dense_intermediate_size": 48},
            **{"shared_intermediate_size": 16, "num_experts_per_tok": 2, "index_n_heads": 2},
            **{"index_head_dim": 8, "index_block_size": 4, "index_topk_blocks": 2},
            "layer_types": ["minimax_m3_sparse"] * 2,
        },
    ),
    "Qwen 4": (
        "Qwen4ExpText",
        {
            **{**_GROUPED, "num_experts_per_tok": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1},
            **{"indexer_head_dim": 8, "indexer_budget": 6, "indexer_compress_ratio": 2},
            "layer_types": ["indexed_attention"] * 2,
        },
    ),
}
"""Models that choose keys for each query by themselves: the stem of their classes, settings."""

_SOUND = {"conv_dim": [8, 8], "conv_kernel": [3, 3], "conv_stride": [2, 2]}


@dataclass(frozen=True, eq=False)
class Family:
    """The stem of its classes in transformers, its name on the page, whether it reads the past
    alone, settings of a tiny config, and those under which its own windows hold every key."""

    stem: str
    title: str
    causal: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    wide: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.stem

    def build(self, attention: str = "eager", head: str = "Model", /, **settings: Any) -> Any:
        return tiny(self.stem, head, attention, **{**self.settings, **settings})

    def inputs(self, left: bool = False) -> dict[str, Tensor]:
        """Three samples; texts are padded."""
        generator = torch.Generator().manual_seed(5)
        ids = tokens(3, N)
        if self.stem in ("CLIPVision", "Dinov2", "Dinov2WithRegisters", "ViT"):
            return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)}
        if self.stem == "Wav2Vec2":
            return {"input_values": torch.randn(3, 60, generator=generator)}
        if self.stem == "Whisper":
            sound = torch.randn(3, 8, 2 * N, generator=generator)
            return {"input_features": sound, "decoder_input_ids": ids}
        decoded = {"decoder_input_ids": ids} if self.stem in ("Bart", "LED", "T5") else {}
        return {"input_ids": ids, "attention_mask": padded(N, left), **decoded}

    def hidden(self, model: Any, **given: Any) -> Tensor:
        """The hidden states at the end, those of padding set to 0."""
        given = given or self.inputs()
        with torch.no_grad():
            states = model(**given)[0]
        mask = given.get("attention_mask")
        return states if mask is None else states * mask[..., None]  # type: ignore[no-any-return]


def _families(causal: bool, rows: Mapping[str, tuple[Any, ...]]) -> list[Family]:
    return [Family(row[0], title, causal, *row[1:]) for title, row in rows.items()]


_WINDOW, _WIDE = {"head_dim": 8, "sliding_window": 4}, {"sliding_window": 40}
BOTH_WAYS: dict[str, tuple[Any, ...]] = {
    "ALBERT": ("Albert",),
    "BART": ("Bart",),
    "BERT": ("Bert",),
    "BigBird": ("BigBird",),
    "CLIP, images": ("CLIPVision", IMAGES),
    "DeBERTa": ("Deberta",),
    "DeBERTa v2, v3": ("DebertaV2",),
    "DINOv2": ("Dinov2", IMAGES),
    "DistilBERT": ("DistilBert",),
    "ELECTRA": ("Electra",),
    "Funnel": ("Funnel", {"num_hidden_layers": ..., "block_sizes": [1, 1], "d_head": 12}),
    "LED": ("LED", {"attention_window": 4}),
    "Longformer": ("Longformer", {"attention_window": [4, 4]}),
    "ModernBERT": ("ModernBert", {"local_attention": 8}, {"local_attention": 80}),
    "MPNet": ("MPNet",),
    "RoBERTa": ("Roberta",),
    "T5": ("T5", {"d_kv": 12, "decoder_start_token_id": 0}),
    "ViT": ("ViT", IMAGES),
    "wav2vec2": (
        "Wav2Vec2",
        {**_SOUND, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2},
    ),
    "Whisper": ("Whisper",),
    "XLNet": ("XLNet", {"max_position_embeddings": ...}),
}
PAST: dict[str, tuple[Any, ...]] = {
    "BLOOM": ("Bloom",),
    "DeepSeek V3.2": ("DeepseekV32", {**CHOOSING["DeepSeek V3.2"][1], "index_topk": 40}),
    "Falcon": ("Falcon",),
    "Gemma": ("Gemma", {"head_dim": 8}),
    # a cap low enough to be felt
    "Gemma 2": ("Gemma2", {**_WINDOW, "attn_logit_softcapping": 2.0}, _WIDE),
    "Gemma 3, text": ("Gemma3Text", _WINDOW, _WIDE),
    "GPT-2": ("GPT2",),
    "GPT-J": ("GPTJ",),
    "GPT-Neo": ("GPTNeo",),
    "GPT-NeoX": ("GPTNeoX",),
    "GPT-OSS": ("GptOss", {**_WINDOW, "num_key_value_heads": 2}, _WIDE),
    "Llama": ("Llama", {"num_key_value_heads": 2}),
    "MiniMax M3": ("MiniMaxM3VLText", {**CHOOSING["MiniMax M3"][1], "index_topk_blocks": 9}),
    "Mistral": ("Mistral", {**_WINDOW, "num_key_value_heads": 2}, _WIDE),
    "Mixtral": ("Mixtral",),
    "MPT": ("Mpt",),
    "OPT": ("OPT",),
    "Phi 3": ("Phi3",),
    "Qwen 2": ("Qwen2",),
    "Qwen 3": ("Qwen3", {"head_dim": 8}),
}
FAMILIES = sorted(
    _families(False, BOTH_WAYS) + _families(True, PAST), key=lambda x: x.title.casefold()
)
BY_STEM = {family.stem: family for family in FAMILIES}


def spec_of(family: Family, graph: str, score: str = "", side: str = "") -> attnspec.Spec:
    """A spec of a name of its own, of a side of a family's models or of the whole."""
    past = family.causal or side == "decoder"
    word = "cross" if side == "cross" else "causal" * past
    # a table for each head needs to know how many there are
    heads = "heads 4" if "bias" in score and side != "cross" else ""
    # a layer that reads the encoder has no bias
    score = "" if side == "cross" else score
    name = f"tried_{next(_numbers)}"
    return attnspec.parse(f"attention {name} {{ {word} {heads} attend {graph} {score} }}")


def specs_of(family: Family, graph: str, score: str = "") -> dict[str, Any]:
    """The arguments of `convert` that give every layer a graph."""
    sides = ("encoder", "decoder", "cross") if family.stem in ("Bart", "T5", "Whisper") else ("",)
    return {side or "spec": spec_of(family, graph, score, side) for side in sides}


def refusal(run: Any, *given: Any) -> str:
    """What a call is refused with, or nothing."""
    try:
        run(*given)
    except attnspec.AttnSpecError as error:
        return str(error)
    return ""


def settings_of(message: str) -> dict[str, Any]:
    """The settings of a config that a message advises, "`name = value`"."""
    found = {}
    for name, text in re.findall(r"`([a-z_]+) = ([^`]+)`", message):
        # a literal, or a list of one times a number
        literal, _, times = text.partition(" * ")
        value = ast.literal_eval(literal)
        found[name] = value * int(times) if times else value
    return found


def score_of(message: str) -> str:
    """The score that a message advises to write into the spec, or nothing."""
    found = re.search(r"`(score [^`]+)`", message)
    return found[1] if found else ""


def require_built(
    family: Family, settings: Mapping[str, Any] | None = None, score: str = ""
) -> None:
    """Raise where a model built with a spec is refused; fail where it reads anything else."""
    changed = dict(settings or {})
    # a cap of the model's own is what the score of the spec stands for
    own = {name: value for name, value in changed.items() if name != "attn_logit_softcapping"}
    wanted = family.hidden(family.build(**own))
    full = family.build(named(spec_of(family, "full", score).source), **changed)
    assert difference(family.hidden(full), wanted) < TOLERANCE
    window = spec_of(family, "window(radius = 2)", score)
    sparse = family.build(named(window.source), **changed)
    assert {layer.kind for layer in used_by(sparse)} == {"spec"}
    convert(other := family.build(**changed), window)
    assert difference(family.hidden(sparse), family.hidden(other)) == 0.0


def require_converted(family: Family, score: str = "") -> None:
    """The same of a model that is there already, which `undo` leaves as it was."""
    for graph, settings in (("full", family.wide), ("window(radius = 2)", {})):
        model = family.build(**settings)
        wanted, specs = family.hidden(model), specs_of(family, graph, score)
        with convert(model, **specs) as done:
            found, layers = family.hidden(model), list(done.layers)
            for spec in specs.values():
                own = [layer.path for layer in layers if f"`{spec.program.name}`" in layer.what]
                assert own
                assert_attends(model, spec, layers=own, call=family.inputs())
            assert {layer.kind for layer in layers} == {"spec"}
        close = difference(found, wanted) < TOLERANCE
        assert close is (graph == "full")
        assert difference(family.hidden(model), wanted) == 0.0


def built(family: Family) -> str:
    """What the page says of models built with a spec, which a refusal advises."""
    message = refusal(require_built, family)
    settings, score = settings_of(message), score_of(message)
    if settings:
        require_built(family, settings, score)
        words = (
            f'`{name} = ["{value[0]}"] * layers`'
            if name == "layer_types"
            else f"`{name} = {value}`"
            for name, value in settings.items()
        )
        return f"works with {', '.join(words)}{_scored(score)}"
    return "no: convert it" if "`convert(model, encoder=" in message else _cell(message)


def converted(family: Family) -> str:
    """What the page says of models that are there already."""
    message = refusal(require_converted, family)
    score = score_of(message)
    if score:
        message = refusal(require_converted, family, score)
    sides = ": `encoder=`, `decoder=`, `cross=`" * (len(specs_of(family, "full")) > 1)
    return _cell(message, f"works{sides}{_scored(score)}")


def _cell(message: str, works: str = "works") -> str:
    own = "in its own code" in message
    return OWN_CODE if own else f"no: {message}" if message else works


def _scored(score: str) -> str:
    return f", with `{score}` in the spec".replace("= 2.0", "= …") if score else ""


def row(family: Family) -> str:
    """What the page says of a family."""
    with names_restored():
        return f"| {family.title} | `{family.stem}…` | {built(family)} | {converted(family)} |"


HEAD = """| family | classes | `attn_implementation = name` | `convert(model, spec)` |
|---|---|---|---|"""

if __name__ == "__main__":
    page = Path(sys.argv[1])
    before, rest = page.read_text(encoding="utf-8").split("<!-- families -->\n")
    rows = "\n".join(map(row, FAMILIES))
    after = rest.split("<!-- /families -->")[1]
    text = f"{before}<!-- families -->\n{HEAD}\n{rows}\n<!-- /families -->{after}"
    page.write_text(text, encoding="utf-8")
