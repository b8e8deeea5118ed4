"""What is said of models that are given specs, and the words with which those that do not fit are
refused before anything is changed: the calls of a file, and the words of each."""

from __future__ import annotations

from typing import Any

import torch
from goldens import Golden
from model_families import BY_STEM
from population import spec_of
from tiny_models import called, named, names_restored, tiny, tokens

import attnspec
from attnspec import AttnSpecError
from attnspec.integrations.transformers import (
    SpecCache,
    bert_from_bigbird,
    register,
    roberta_from_longformer,
    used_by,
)
from attnspec.integrations.transformers import convert as converted

IDS, FULL, CAUSAL = tokens(1, 5), spec_of("attend full"), spec_of("causal attend full")
BAND = spec_of("cross attend where(abs(q - k) <= 2)")


def build(stem: str, /, *given: Any, **settings: Any) -> Any:
    return BY_STEM[stem].build(*given, **settings)


def name(body: str) -> str:
    return named(spec_of(body).source)


def convert(model: Any, *specs: Any, **more: Any) -> Any:
    """A model with specs, or as it was."""
    before = [module.config for module in model.modules() if hasattr(module, "config")]
    try:
        return converted(model, *specs, **more)
    except AttnSpecError:
        after = [module.config for module in model.modules() if hasattr(module, "config")]
        assert all(a is b for a, b in zip(after, before, strict=True))
        assert {layer.kind for layer in used_by(model)} <= {"dense"}
        raise


def write(body: str, cached: bool = False) -> None:
    """A text of five tokens is gone on with."""
    model = build("Llama", "eager", "ForCausalLM", eos_token_id=None)
    converted(model, spec_of(body))
    more = {"past_key_values": SpecCache(model)} if cached else {}
    model.generate(IDS, max_new_tokens=6, do_sample=False, **more)


NAMES = {
    **{"torch": torch, "attnspec": attnspec, "IDS": IDS},
    **{"FULL": FULL, "CAUSAL": CAUSAL, "BAND": BAND},
    **{x.__name__: x for x in (build, called, convert, name, register, spec_of, tiny, write)},
    **{x.__name__: x for x in (bert_from_bigbird, roberta_from_longformer, used_by)},
}
"""What the calls of the file are made of."""


def test_conversions_answer_and_refuse_as_approved(golden: Golden) -> None:
    def ask(call: str) -> tuple[str, str]:
        # specs of one name are numbered
        with names_restored():
            return "said", str(eval(call, NAMES))

    golden.calls(ask)
