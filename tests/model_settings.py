"""Models of transformers x attention x setting: whether each reads what its config means.

`python tests/model_settings.py docs/verify.md` writes the table of the page anew.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from tiny_models import tiny, tokens, transformers

import attnspec
from attnspec.integrations.transformers import convert

PAGE = Path(__file__).parent.parent / "docs" / "verify.md"
IMPLEMENTATIONS = ("eager", "sdpa", "flex_attention", "attnspec")
LENGTH, SHORT, WINDOW = 12, 8, 4
_LAST = f"window(before = {WINDOW - 1}, after = 0)"
_MIXED = f"causal layers 2 layer 0 {{ attend {_LAST} }} layer 1 {{ attend full }}"
_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
_SLIDING = {"sliding_window": WINDOW, "num_key_value_heads": 2}
MODELS: Mapping[str, tuple[dict[str, Any], str]] = {
    "Bert": ({}, "attend full"),
    "ModernBert": (
        {**_KINDS, "local_attention": 2 * WINDOW},
        f"layers 2 layer 0 {{ attend window(radius = {WINDOW}) }} layer 1 {{ attend full }}",
    ),
    "GPT2": ({}, "causal attend full"),
    "Llama": ({"num_key_value_heads": 2}, "causal attend full"),
    "Mistral": (_SLIDING, f"causal attend {_LAST}"),
    "Gemma3Text": ({**_SLIDING, **_KINDS, "head_dim": 8}, _MIXED),
    "GptOss": ({**_SLIDING, **_KINDS, "head_dim": 8}, _MIXED),
}
"""Stems of classes, settings of a tiny config, and what it means as a spec."""

SETTINGS = (
    "plain",
    "padded left",
    "padded right",
    "packed, no cache",
    "packed",
    "packed, 2-D mask",
    "one token, dynamic cache",
    "one token, static cache",
    "second chunk",
)


def build(name: str, implementation: str) -> Any:
    return tiny(name, "Model", implementation, **MODELS[name][0])


def call_of(model: Any, setting: str) -> dict[str, Any] | None:
    """The arguments of a setting; None where the model has no such."""
    ids, mask = tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.long)
    call: dict[str, Any] = {"input_ids": ids}
    encoder = not hasattr(model.config, "use_cache") or type(model).__name__ == "BertModel"
    if setting.startswith("padded"):
        mask[0, :3] = mask[1, :1] = 0
        call["attention_mask"] = mask if setting == "padded left" else mask.flip(1)
    if setting.startswith("packed"):
        starts = torch.arange(LENGTH)
        call["position_ids"] = torch.where(starts < 5, starts, starts - 5).expand(2, -1)
        if "mask" in setting:
            call["attention_mask"] = mask
        if "no cache" in setting and not encoder:
            call["use_cache"] = False
        return None if setting == "packed" and encoder else call
    if "cache" in setting or "chunk" in setting:
        if encoder:
            return None
        static = {"config": model.config, "max_cache_len": LENGTH + 3}
        cache = (
            transformers.StaticCache(**static)
            if "static" in setting
            else transformers.DynamicCache(config=model.config)
        )
        first = SHORT if "chunk" in setting else LENGTH - 1
        with torch.no_grad():
            model(input_ids=ids[:, :first], past_key_values=cache)
        return {"input_ids": ids[:, first:], "past_key_values": cache}
    return call


def outcome(name: str, implementation: str, setting: str) -> str:
    """What comes out: "equal", what leaks, what is missing, or that it is refused."""
    packed = setting.startswith("packed")
    body = MODELS[name][1]
    text = body.replace("}", "& same(document) }") if "{" in body else f"{body} & same(document)"
    own = f"attention meant {{ {f'input document: ids {text}' if packed else body} }}"
    spec = attnspec.parse(own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ours = implementation == "attnspec"
            model = build(name, "eager" if ours else implementation)
            if ours:
                convert(model, spec)
            call = call_of(model, setting)
            if call is None:
                return "–"
            report = attnspec.verify_model(model, spec, call=call)
        except (ValueError, NotImplementedError, RuntimeError):
            return "refused"
    if report.ok:
        return "equal"
    leaks = {what.removesuffix(" is read") for layer in report.layers for what, _ in layer.causes}
    if report.leaks:
        return f"**reads {' and '.join(sorted(leaks)) or 'too much'}**"
    return "**does not read all**" if report.missing else "not shown"


@contextmanager
def uncompiled() -> Iterator[None]:
    """FlexAttention as plain operations, which a table of tiny models need not wait for."""
    flex = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
    with torch._dynamo.config.patch(disable=True), patch(flex, True):
        yield


def table() -> str:
    """The rows of the page."""
    head = ("model", "attention", *SETTINGS)
    lines = [head, ["---"] * len(head)]
    with uncompiled():
        for name in MODELS:
            for implementation in IMPLEMENTATIONS:
                cells = [outcome(name, implementation, setting) for setting in SETTINGS]
                lines.append((name, f"`{implementation}`", *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def shown() -> dict[tuple[str, str], dict[str, str]]:
    """The outcomes on the page, by model and implementation, by setting."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text("utf-8").splitlines()]
    return {
        (name, implementation.strip("`")): dict(zip(SETTINGS, cells, strict=True))
        for name, implementation, *cells in (row for row in rows if row[0] in MODELS)
    }


if __name__ == "__main__":
    page = Path(sys.argv[1])
    before, rest = page.read_text(encoding="utf-8").split("<!-- settings -->\n")
    after = rest.split("<!-- /settings -->")[1]
    text = f"{before}<!-- settings -->\n{table()}\n<!-- /settings -->{after}"
    page.write_text(text, encoding="utf-8")
