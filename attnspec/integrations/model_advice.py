"""What a model adds to its attention that no spec says, and the way out of each.

Settings stand in back quotes as `name = value`: they go into the config that the model is built
with, `from_pretrained(path, name=value)`; modules read most of them once, when they are built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from attnspec.integrations.model_layers import attribute_of, passes
from attnspec.integrations.model_mask import REPLACED

CROSS = (
    "use `convert(model, encoder=spec1, decoder=spec2, cross=spec3)`, where each spec is optional"
)
"""The way out where a model reads another sequence."""

KEEP = "so keep the model's own attention"
OWN = f"no spec can describe that, {KEEP}"
"""The way out where there is no other."""

READS_BOTH_WAYS = (
    ", or use `convert` with `causal=False` if the model is meant to read later positions"
)
"""What is added where later keys are read, in a model that may be meant to."""

COUNTS_REAL = '`convert(model, spec, positions="real")` counts the real tokens of each sample alone'
"""The way out where padding moves positions."""

_KEPT = {"sliding_window": "sliding_window", "softcap": "attn_logit_softcapping"}
"""Keywords of models, and where the layer or its config keeps what it will pass."""

_OTHERS = {
    "encoder_hidden_states": f"that is cross-attention: {CROSS}",
    "output_attentions": "the weights are never formed; "
    '`model.set_attn_implementation("eager")` shows those of the model\'s own attention',
}

PACKED = (
    "describe the documents in the spec by `input document: ids` and `same(document)`, with"
    " `causal` if the model is causal"
)
"""The way out where several documents are packed into one sequence."""


def of_terms(terms: Mapping[str, object], module: nn.Module) -> str:
    """What to do about keywords that a layer passes, with their values."""
    width, window = terms.get("sliding_window"), "the window"
    if type(width) is int and getattr(module, "is_causal", False):
        window = f"`attend window(before = {width - 1}, after = 0)`"
    layer = getattr(module, "layer_idx", "N")
    window += f" in the spec, in `layer {layer} {{ … }}` if other layers differ,"
    advice = {
        **_OTHERS,
        "sliding_window": f"write {window} and {_full_layers(module)}",
        "softcap": f"the spec must have `score softcap(cap = {terms.get('softcap')})`",
        "position_bias": of_bias(module),
    }
    kept = [way for name in terms if (way := advice.get(name, OWN)).endswith(KEEP)]
    said = (f"for `{name}`, " * (len(terms) > 1) + advice[name] for name in terms)
    return kept[0] if kept else "; ".join(said)


def of_bias(module: nn.Module, then: str = f", then {CROSS}") -> str:
    """What to do about a learned bias by distance, of which the model has the table."""
    buckets = getattr(module, "relative_attention_num_buckets", None)
    farthest = getattr(module, "relative_attention_max_distance", None)
    if buckets is None or farthest is None:
        return f"`score bias(…)` describes the bias of T5 alone, {KEEP}"
    return (
        f"write `score bias(buckets = {buckets}, max_distance = {farthest})` in the spec{then};"
        " `convert` fills in the model's table"
    )


def of_mask(kind: str, module: nn.Module) -> str:
    """What to do about a kind of mask that the model composes for itself."""
    if kind in REPLACED:
        return f"write it in the spec and {_full_layers(module)}"
    return PACKED if kind == "packed" else OWN


def own_terms(module: nn.Module) -> Iterator[tuple[str, object]]:
    """The keywords that an attention layer will pass and a spec does not say, with their values."""
    for keyword, attribute in _KEPT.items():
        if passes(type(module), keyword):
            value = attribute_of(module, attribute)
            if value is not None:
                yield keyword, value
    # made anew for every call: nothing keeps it
    if passes(type(module), "position_bias"):
        yield "position_bias", True


def _full_layers(module: nn.Module) -> str:
    """How to build the model such that no layer has a pattern of its own."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return "build the model with `sliding_window = None`"
    bases = getattr(config, "rope_parameters", None) or {}
    rotations = [bases[kind] for kind in sorted(set(kinds)) if isinstance(bases.get(kind), dict)]
    turned = any(rotation != rotations[0] for rotation in rotations)
    return f'build the model with `layer_types = ["full_attention"] * {len(kinds)}`' + (
        "; all layers then use the rotary embedding of the full-attention layers" if turned else ""
    )
