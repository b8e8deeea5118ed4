"""Weights of Longformer and BigBird in RoBERTa and BERT with a spec: the same numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import TOLERANCE, difference, names_restored, tokens, transformers

import attnspec
from attnspec.integrations.model_mask import model_mask
from attnspec.integrations.model_use import own_config
from attnspec.integrations.model_weights import GLOBAL
from attnspec.integrations.transformers import bert_from_bigbird, roberta_from_longformer

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
    "max_position_embeddings": 80,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "sep_token_id": 2,
}
N = 21


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


def built(stem: str, head: str = "Model", **settings: Any) -> Any:
    config = getattr(transformers, f"{stem}Config")(**SIZES, **settings)
    torch.manual_seed(1)
    return getattr(transformers, f"{stem}{head}")(config).eval()


def first(model: Any, mask: torch.Tensor, **given: Any) -> torch.Tensor:
    """What a model says of a text, that of padding set to 0."""
    with torch.no_grad():
        found = model(tokens(2, mask.shape[1]), attention_mask=mask, **given)[0]
    return found * mask[..., None] if found.ndim == 3 else found  # type: ignore[no-any-return]


def mask_of(n: int, other: int) -> torch.Tensor:
    mask = torch.ones(2, n, dtype=torch.long)
    mask[1, other:] = 0
    return mask


def shared(model: Any) -> Any:
    """The model with one projection for all tokens, as a checkpoint begins."""
    for layer in model.base_model.encoder.layer:
        attention = layer.attention.self
        for name in GLOBAL:
            own = getattr(attention, name.removesuffix("_global"))
            getattr(attention, name).load_state_dict(own.state_dict())
    return model


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForTokenClassification"])
def test_windows_of_longformer(head: str) -> None:
    model, mask = built("Longformer", head, attention_window=[4, 8]), mask_of(N, 15)
    done = roberta_from_longformer(model)
    wanted = first(model, mask)
    assert difference(first(done.model, mask), wanted) < TOLERANCE
    assert "layer 1: " in str(done)
    done.undo()
    assert difference(first(done.model, mask), wanted) > 0.01


@pytest.mark.filterwarnings("ignore:`longformer` names positions")
@pytest.mark.parametrize(
    ("head", "left", "width"),
    [("Model", False, [4, 8]), ("Model", True, 12), ("ForSequenceClassification", False, [4, 8])],
)
def test_global_tokens_of_longformer(head: str, left: bool, width: Any) -> None:
    model, mask = shared(built("Longformer", head, attention_window=width)), mask_of(N, 15)
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


def test_projections_of_global_tokens_are_refused() -> None:
    model = built("Longformer", attention_window=4)
    with pytest.raises(attnspec.AttnSpecError, match=r"`encoder.layer.0.*query_global.*differs"):
        roberta_from_longformer(model, "important")
    assert set(roberta_from_longformer(model).model.state_dict()) == set(
        built("Roberta").state_dict()
    )


def test_a_head_that_marks_tokens_needs_the_input() -> None:
    model = built("Longformer", "ForSequenceClassification", attention_window=4)
    with pytest.raises(attnspec.AttnSpecError, match="marks some by itself"):
        roberta_from_longformer(model)


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForTokenClassification"])
def test_full_attention_of_bigbird(head: str) -> None:
    model, mask = built("BigBird", head, attention_type="original_full"), mask_of(N, 15)
    done = bert_from_bigbird(model)
    assert difference(first(done.model, mask), first(model, mask)) < TOLERANCE


def test_blocks_of_bigbird() -> None:
    size, n = 4, 48
    model, mask = built("BigBird", block_size=size, num_random_blocks=1), mask_of(n, n)
    done = bert_from_bigbird(model)
    text = "block(size = 4, before = 1, after = 1) | global(first(4) | last(4))"
    blocks = attnspec.parse(f"attention b {{ attend {text} }}").mask(n)
    assert f"`bigbird` at n = {SIZES['max_position_embeddings']}" in str(done)

    # transformers draws the first block in evaluation, and counts its keys once more
    again = np.zeros((n, n))
    again[size:-size, :size] = math.log(2)
    bias = torch.from_numpy(np.where(blocks, again, -np.inf)).float()

    def attend(module: Any, q: Any, k: Any, v: Any, _mask: Any, **given: Any) -> Any:
        scores = q @ k.transpose(-1, -2) * given["scaling"] + bias
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    transformers.AttentionInterface.register("counted_again", attend)
    transformers.AttentionMaskInterface.register("counted_again", model_mask)
    found = first(done.model, mask)
    done.undo()
    own_config(done.model, "counted_again")
    wanted = first(model, mask)
    assert model.attention_type == "block_sparse"
    assert difference(first(done.model, mask), wanted) < TOLERANCE
    # the spec draws blocks as in the paper
    assert difference(found, wanted) > 0.01


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rescale_embeddings": True}, "BERT scales none"),
        ({"is_decoder": True}, "reads both sides"),
    ],
)
def test_what_bert_cannot_do(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(attnspec.AttnSpecError, match=message):
        bert_from_bigbird(built("BigBird", attention_type="original_full", **settings))


def test_models_of_other_families_are_refused() -> None:
    with pytest.raises(attnspec.AttnSpecError, match="a Longformer model is needed, got RobertaM"):
        roberta_from_longformer(built("Roberta"))
    with pytest.raises(attnspec.AttnSpecError, match="a BigBird model is needed, got BertModel"):
        bert_from_bigbird(built("Bert"))
