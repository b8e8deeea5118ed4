"""What people write who come from other systems, and what says it here."""

from __future__ import annotations

from attnspec.elaborate.names import NORMALIZERS, SCORES
from attnspec.elaborate.scope import Scope

SYSTEMS = frozenset(
    "based bigbird blockbert deepspeed gemma2 gemma3 linear_transformer longformer longlora longt5"
    " block_causal block_diffusion logsparse lolcats moba openai quest routing_transformer"
    " scatterbrain shared_prefix streaming_llm swin tree_decoding xattention".split()
)
"""Systems of which `attnspec zoo` has a spec, by the first words of its name."""

_MEANT = {
    "cls": "a token is meant by its position: `first(1)` is the first one, `global(first(1))`",
    "document": "labels come at run time: `input document: ids`, then `same(document)`",
    "extra": "extra tokens stand before the sequence: `first(c)` are the first c positions",
    "relative": "a learned number for each distance is the statement `score bias()`",
    "tree": "`attnspec zoo tree_decoding` and `attnspec zoo tree_heap` are masks of trees",
    "sink": "`columns(first(c))` are the pairs whose key is one of the first c positions",
    "rope": "positions are rotated in q and k before the call; no pair depends on it",
    "dropout": "a call takes it: `module(q, k, v, dropout_p = 0.1)`",
    "mask": "`where(…)` takes a predicate of q and k",
    "padding": "a call takes it: `module(q, k, v, key_padding_mask = …)`",
    "flash": "how a graph runs is chosen by the planner; `attend full` reads every key",
}
_ALIASES = {
    **dict.fromkeys(("cls_token", "class_token", "bos"), "cls"),
    **dict.fromkeys(("doc", "docs", "documents", "segment", "segments"), "document"),
    **dict.fromkeys(("registers", "extra_token", "extras"), "extra"),
    **dict.fromkeys(("relative_bias", "relative_position", "relative_positions"), "relative"),
    **dict.fromkeys(("ancestors", "speculative", "medusa"), "tree"),
    "sinks": "sink",
    "attention_sink": "sink",
    "attention_sinks": "sink",
    "rotary": "rope",
    "mask_mod": "mask",
    "attn_mask": "mask",
    "padding_mask": "padding",
    "key_padding_mask": "padding",
    "flash_attention": "flash",
    "sdpa": "flash",
    "flex": "flash",
}


def meant(name: str, scope: Scope) -> str | None:
    """The way out where a graph is expected and a word of another system, or of another place of
    the language, stands; None for other words."""
    low = name.lower()
    if low in SCORES:
        return f"it changes scores, not pairs: the statement `score {low}(…)` beside `attend`"
    if low in NORMALIZERS:
        return f"it normalises scores: the statement `normalize {low}` beside `attend`"
    sentence = _MEANT.get(_ALIASES.get(low, low))
    if sentence is None and name in scope.module.attentions:
        sentence = (
            f"`{name}` is an attention: `graph {name}(…) = …` names a graph for others to use"
        )
    if sentence is None and low in SYSTEMS:
        sentence = f"a system is a whole spec: `attnspec zoo` has some, by names like `{low}`"
    return sentence
