"""What people write who come from other systems, and what says it here."""

from __future__ import annotations

from attnspec.elaborate.names import NORMALIZERS, SCORES
from attnspec.elaborate.scope import Scope
from attnspec.grammar.syntax_errors import ROPE

SYSTEMS = frozenset(
    "based bigbird blockbert deepspeed gemma2 gemma3 linear_transformer longformer longlora longt5"
    " block_causal block_diffusion logsparse lolcats moba openai quest routing_transformer"
    " scatterbrain shared_prefix streaming_llm swin tree_decoding xattention".split()
)
"""Systems of which `attnspec zoo` has a spec, by the first words of its name."""

_MEANT = {
    "cls": "for the first token write `first(1)`, as in `global(first(1))`",
    "document": "declare `input {0}: ids`, write `same({0})`, and pass the labels in a call",
    "extra": "for c extra tokens write `first(c)`: they come before the sequence",
    "relative": "write the statement `score bias()`: it adds a learned number for each distance",
    "tree": "`attnspec zoo tree_decoding` and `attnspec zoo tree_heap` print two specs of trees",
    "sink": "`columns(first(c))` lets every query read the first c positions",
    "rope": ROPE,
    "dropout": "pass dropout in a call: `module(q, k, v, dropout_p = 0.1)`",
    "mask": "write `where(…)` with a condition on q and k, as in `where(q >= k)`",
    "padding": "pass padding in a call: `module(q, k, v, key_padding_mask = …)`",
    "flash": "the backend is chosen by `compile(backend=…)`; `attend full` reads every key",
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
        return f"`{low}` changes scores, not pairs: write the statement `score {low}(…)`"
    if low in NORMALIZERS:
        return f"`{low}` normalises scores: write the statement `normalize {low}`"
    sentence = _MEANT.get(_ALIASES.get(low, low))
    if sentence is None and name in scope.module.attentions:
        return f"write what `{name}` attends as `graph NAME = …` outside of it, and use `NAME`"
    if sentence is None and low in SYSTEMS:
        shipped = "`attnspec zoo` lists the specs that ship, and `attnspec zoo NAME` prints one"
        sentence = f"`{low}` is a whole spec, not a graph: {shipped}"
    # a named graph has only the inputs that are passed to it
    in_graph = scope.expanding and sentence and "declare `input" in sentence
    return sentence.format(name) if sentence and not in_graph else None


def undefined(name: str, scope: Scope) -> str:
    """What is wrong with a name that stands for nothing where it is used."""
    if name in scope.module.attentions:
        return f"`{name}` is an attention, and an attention cannot be used in an expression"
    return f"`{name}` is not defined"
