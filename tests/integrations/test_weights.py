"""Weights of Longformer and BigBird in RoBERTa and BERT with a spec: the same numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TOLERANCE, difference, tiny, tokens
from torch import Tensor

import attnspec
from attnspec.integrations.transformers import bert_from_bigbird, roberta_from_longformer

N = 21


def first(model: Any, mask: Tensor, **given: Any) -> Tensor:
    """What a model says of a text, that of padding set to 0."""
    with torch.no_grad():
        found = model(tokens(2, mask.shape[1]), attention_mask=mask, **given)[0]
    return found * mask[..., None] if found.ndim == 3 else found  # type: ignore[no-any-return]


def mask_of(n: int, other: int) -> Tensor:
    mask = torch.ones(2, n, dtype=torch.long)
    mask[1, other:] = 0
    return mask


def shared(model: Any) -> Any:
    """The model with one projection for all tokens, as a checkpoint begins."""
    for layer in model.base_model.encoder.layer:
        attention = layer.attention.self
        for name in ("query", "key", "value"):
            own = getattr(attention, name).state_dict()
            getattr(attention, f"{name}_global").load_state_dict(own)
    return model


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForTokenClassification"])
def test_windows_of_longformer_and_full_attention_of_bigbird(head: str) -> None:
    model, mask = tiny("Longformer", head, attention_window=[4, 8]), mask_of(N, 15)
    done = roberta_from_longformer(model)
    wanted = first(model, mask)
    assert difference(first(done.model, mask), wanted) < TOLERANCE
    assert "layer 1: " in str(done)
    done.undo()
    assert difference(first(done.model, mask), wanted) > 0.01
    model = tiny("BigBird", head, attention_type="original_full")
    done = bert_from_bigbird(model)
    assert difference(first(done.model, mask), first(model, mask)) < TOLERANCE


@pytest.mark.filterwarnings("ignore:`longformer` names positions")
@pytest.mark.parametrize(
    ("head", "left", "width"),
    [("Model", False, [4, 8]), ("Model", True, 12), ("ForSequenceClassification", False, [4, 8])],
)
def test_global_tokens_of_longformer(head: str, left: bool, width: Any) -> None:
    model, mask = shared(tiny("Longformer", head, attention_window=width)), mask_of(N, 15)
    mask = mask.flip(1) if left else mask
    # one of them padding
    marked = torch.zeros(2, N, dtype=torch.bool)
    marked[1, 2 if left else 20] = True
    marked[:, 0] = marked[0, 7] = True
    done = roberta_from_longformer(model, "important")
    wanted = first(model, mask, global_attention_mask=marked.long())
    found = first(done.model, mask, attnspec_inputs={"important": marked})
    assert difference(found, wanted) < TOLERANCE
    none = torch.zeros_like(marked)
    assert difference(first(done.model, mask, attnspec_inputs={"important": none}), wanted) > 0.01


def test_blocks_of_bigbird() -> None:
    size, n = 4, 48
    model, mask = tiny("BigBird", block_size=size, num_random_blocks=1), mask_of(n, n)
    done = bert_from_bigbird(model)
    assert "`bigbird` at n = 64" in str(done)
    found = first(done.model, mask)
    done.undo()
    # transformers draws the first block in evaluation, and counts its keys once more
    text = "block(size = 4, before = 1, after = 1) | global(first(4) | last(4))"
    blocks = attnspec.parse(f"attention b {{ attend {text} }}").mask(n)
    bias = np.where(blocks, 0.0, -np.inf)
    bias[size:-size, :size] += np.log(2)
    with torch.no_grad():
        mask_4d = torch.from_numpy(bias)[None, None].float()
        wanted = done.model(tokens(2, n), attention_mask=mask_4d)[0]
    assert difference(first(model, mask), wanted) < TOLERANCE
    assert model.attention_type == "block_sparse"
    # the spec draws blocks as in the paper
    assert difference(found, wanted) > 0.01
