"""Weights of models that compute a sparse attention of their own, in models that ask for one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from attnspec.spec import Spec, parse
from attnspec.text.diagnostics import AttnSpecError

GLOBAL = ("query_global", "key_global", "value_global")
"""The projections of Longformer's global tokens, beside `query`, `key` and `value`."""

_MARKS_TOKENS = {
    "ForSequenceClassification": "its first token",
    "ForQuestionAnswering": "the tokens of the question",
    "ForMultipleChoice": "the tokens after the question",
}
"""Heads of Longformer that make tokens global without being told, and which."""


def roberta_of_longformer(model: Any, important: str | None) -> tuple[Any, Spec]:
    """A RoBERTa with the weights of a Longformer, and the spec of its windows, a radius for each
    layer; with `important`, the name of an input of kind `tokens`, these are global.

    Rows of global tokens have projections of their own in Longformer, and RoBERTa has none: they
    must be the same, as where a checkpoint was begun from. Raises AttnSpecError where they are not.
    """
    made = _other(model, "Longformer", "Roberta")
    config, state, kind = model.config, model.state_dict(), type(model).__name__
    for head, marked in _MARKS_TOKENS.items():
        if important is None and kind.endswith(head):
            raise AttnSpecError(
                f"{kind} makes {marked} global by itself, and RoBERTa does not: name an input of"
                f' global tokens by `important="important"`, and in each call mark {marked} by'
                ' `attnspec_inputs={"important": …}`'
            )
    of_global = [key for key in state if any(f".{name}." in key for name in GLOBAL)]
    shared = {key: value for key, value in state.items() if key not in of_global}
    for key in of_global if important is not None else ():
        value, other = state[key], state[key.replace("_global.", ".")]
        if not torch.equal(value, other):
            raise AttnSpecError(
                f"RoBERTa has no separate projections for global tokens, and `{key}` differs from"
                f" `{key.replace('_global.', '.')}` by up to"
                f" {float((value - other).abs().max()):.3g}: leave `important` out, which makes"
                " every token read its window alone; or copy the weights of `query`, `key` and"
                " `value` to `query_global`, `key_global` and `value_global`, and train"
            )
    widths = config.attention_window
    widths = [widths] * config.num_hidden_layers if isinstance(widths, int) else list(widths)
    declared, beside = f"input {important}: tokens ", f" | global({important})"
    if important is None:
        declared = beside = ""
    layers = " ".join(
        f"layer {layer} {{ attend window(radius = {width // 2}){beside} }}"
        for layer, width in enumerate(widths)
    )
    spec = parse(f"attention longformer {{ layers {len(widths)} {declared}{layers} }}")
    return _filled(made, model, "longformer", shared), spec


def bert_of_bigbird(model: Any) -> tuple[Any, Spec]:
    """A BERT with the weights of a BigBird, and the spec of its blocks: the block of a query and
    those beside it, the first and the last block global, and random ones, which are drawn by the
    language's own generator. Full attention, `attention_type = "original_full"`, stays full.

    Raises AttnSpecError for embeddings that BERT does not scale.
    """
    made, config = _other(model, "BigBird", "Bert"), model.config
    if config.rescale_embeddings:
        raise AttnSpecError(
            "BERT does not scale embeddings, and this BigBird has `rescale_embeddings = True`: set"
            " it to False and multiply `embeddings.word_embeddings.weight` by sqrt(hidden_size)"
        )
    if config.is_decoder:
        raise AttnSpecError("this BigBird is a decoder, and only encoders are converted: keep it")
    state = {
        re.sub(r"pooler\.(\w+)$", r"pooler.dense.\1", key): value
        for key, value in model.state_dict().items()
    }
    return _filled(made, model, "bert", state), parse(_blocks(config))


def _blocks(config: Any) -> str:
    if config.attention_type == "original_full":
        return "attention bigbird { attend full }"
    size, drawn = config.block_size, config.num_random_blocks
    blocks = f" | random_blocks(size = {size}, blocks = {drawn})" if drawn else ""
    return (
        f"attention bigbird {{ layers {config.num_hidden_layers} heads {config.num_attention_heads}"
        f" attend block(size = {size}, before = 1, after = 1)"
        f" | global(first({size}) | last({size})){blocks} }}"
    )


def _other(model: Any, old: str, new: str) -> Any:
    """A model of another family with the same head and sizes."""
    transformers = import_module("transformers")
    name = type(model).__name__
    kind = getattr(transformers, name.replace(old, new), None)
    if kind is None or not name.startswith(old):
        raise AttnSpecError(f"model must be a {old}, got {name}")
    settings = model.config.to_dict()
    for field in ("model_type", "architectures", "attention_window", "attention_type"):
        settings.pop(field, None)
    return kind(getattr(transformers, f"{new}Config")(**settings))


def _filled(made: Any, model: Any, prefix: str, state: Mapping[str, Tensor]) -> Any:
    """A model with weights of another, whose body goes by a prefix, and in its mode."""
    body = f"{made.base_model_prefix}."
    renamed = {
        body + key.removeprefix(f"{prefix}.") if key.startswith(f"{prefix}.") else key: value
        for key, value in state.items()
    }
    wanted = set(made.state_dict())
    # a head that asks for no pooled token has none in one of the two
    renamed = {key: x for key, x in renamed.items() if key in wanted or ".pooler." not in key}
    apart = sorted(wanted ^ set(renamed))
    if apart:
        names = f"{type(model).__name__} and {type(made).__name__}"
        raise AttnSpecError(
            f"{names} must have weights of the same names, and {len(apart)} are in one alone, such"
            f" as `{apart[0]}`: if it belongs to the head, take the model without its head"
        )
    made.load_state_dict(renamed)
    reference = next(model.parameters())
    return made.to(reference.device, reference.dtype).train(model.training)
