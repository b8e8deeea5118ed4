"""Positions that count real tokens: padding, wherever it stands, changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import difference, hidden, llama, names_restored, tokens
from tiny_models import transformers as hf

import attnspec
from attnspec.integrations.model_choices import Running
from attnspec.integrations.real_positions import RealRunning
from attnspec.integrations.transformers import SpecCache, convert, with_inputs

LENGTHS = (17, 11, 4, 11)
N, NEW = 17, 6
TEXTS = {
    "sinks": "causal attend window(before = 2, after = 0) | columns(first(2))",
    "blocks": "causal attend block(size = 4)",
    "strides": "causal attend residue(step = 4) | self",
    "draws": "causal attend random(keys = 2, seed = 1) | self",
    "sums": "causal attend linear()",
    "documents": "causal input x: ids attend same(x) & residue(step = 2) | self",
    "chosen": "causal input x: choices attend chosen(x) | self",
    "by_head": "causal heads 4 attend full head 1 { attend columns(first(1)) | self }",
    "lengths": "causal attend window(before = n // 4, after = 0) | columns(first(1))",
}


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    with names_restored():
        yield


def real_of(left: bool) -> torch.Tensor:
    """int [4, N], 1 for a real token."""
    at = torch.arange(N)
    rows = [at >= N - length if left else at < length for length in LENGTHS]
    return torch.stack(rows).long()


def inputs_of(kind: str, rows: int, shift: torch.Tensor) -> dict[str, Any]:
    """The input of a text, of so many positions, whose samples begin at `shift`."""
    at = torch.arange(rows) - shift[:, None]
    if kind == "documents":
        return {"x": torch.where(at < 0, 9, at // 5)}
    if kind == "chosen":
        keys = torch.where(at >= 2, at - 2 + shift[:, None], -1)
        return {"x": keys[:, None, :, None]}
    return {}


def part(inputs: dict[str, Any], kind: str, first: int, end: int) -> dict[str, Any]:
    return {x: t[:, :, first:end] if kind == "chosen" else t[:, :end] for x, t in inputs.items()}


def cache_of(name: str, model: Any) -> Any:
    if name == "static":
        return hf.StaticCache(config=model.config, max_cache_len=N + NEW)
    return SpecCache(model) if name == "spec" else hf.DynamicCache()


@pytest.mark.parametrize("kind", TEXTS)
def test_padding_takes_no_position(kind: str) -> None:
    spec, model = attnspec.parse(f"attention {kind} {{ {TEXTS[kind]} }}"), llama("eager")
    ids = tokens(4, N)
    done = convert(model, spec, positions="real")
    starts = torch.tensor([N - length for length in LENGTHS])
    alone = [
        _rows(model, ids[b : b + 1, N - length :], inputs_of(kind, length, starts[:1] * 0))
        for b, length in enumerate(LENGTHS)
    ]
    mask, given = real_of(left=True), inputs_of(kind, N, starts)
    whole = _rows(model, ids * mask, given, mask)
    assert _apart(whole, alone) < 1e-5
    for name in ("dynamic", "static", "spec") if kind != "lengths" else ():
        cache, rows = cache_of(name, model), []
        for first, end in ((0, 5), (5, N - 1), (N - 1, N)):
            here = part(given, kind, first, end)
            rows.append(_rows(model, (ids * mask)[:, first:end], here, mask[:, :end], cache))
        assert _apart(torch.cat(rows, 1), alone) < 1e-5
    if not given:
        return
    with with_inputs(done, inputs_of(kind, N + NEW, starts)):
        model.generate(ids * mask, attention_mask=mask, max_new_tokens=NEW)


def _rows(model: Any, ids: Any, inputs: Any, mask: Any = None, cache: Any = None) -> torch.Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    more = {"attnspec_inputs": inputs} if inputs else {}
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=at, past_key_values=cache, **more)
    return out.logits  # type: ignore[no-any-return]


def _apart(padded: torch.Tensor, alone: list[torch.Tensor]) -> float:
    pairs = zip(padded, alone, strict=True)
    return max(difference(x[N - y.shape[1] :], y[0]) for x, y in pairs)


@pytest.mark.parametrize("how", ["dynamic", "static", "spec", "beams"])
def test_padded_samples_write_as_alone(how: str) -> None:
    model, mask = llama("eager"), real_of(left=True)
    convert(model, attnspec.parse(f"attention s {{ {TEXTS['sinks']} }}"), positions="real")
    ids = tokens(4, N) * mask

    def write(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        more: dict[str, Any] = {"cache_implementation": "static"} if how == "static" else {}
        more |= {"past_key_values": SpecCache(model)} if how in ("spec", "beams") else {}
        more |= {"num_beams": 3} if how == "beams" else {}
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **more
        )
        return found[:, ids.shape[1] :]  # type: ignore[no-any-return]

    rows = [write(ids[b : b + 1, N - x :], mask[b : b + 1, N - x :]) for b, x in enumerate(LENGTHS)]
    assert (write(ids, mask) == torch.cat(rows)).all()


def test_tokens_after_padding_on_the_right() -> None:
    model, mask, more = llama("eager"), real_of(left=False), torch.ones(4, 3, dtype=torch.long)
    ids, new, spec = tokens(4, N) * mask, tokens(4, 3), f"attention s {{ {TEXTS['sinks']} }}"
    with convert(model, attnspec.parse(spec), positions="real"):
        cache = hf.DynamicCache()
        _rows(model, ids, {}, mask, cache)
        rows = _rows(model, new, {}, torch.cat([mask, more], 1), cache)
        for b, length in enumerate(LENGTHS):
            joined = torch.cat([ids[b : b + 1, :length], new[b : b + 1]], 1)
            assert difference(rows[b], hidden(model, joined)[0, -3:]) < 1e-5
    convert(model, attnspec.parse(spec))
    cache = hf.DynamicCache()
    _rows(model, ids, {}, mask, cache)
    with pytest.warns(UserWarning, match='padding between tokens counts.*positions="real"'):
        _rows(model, new, {}, torch.cat([mask, more], 1), cache)


def test_the_warning_names_real_positions() -> None:
    model, mask = llama("eager"), real_of(left=True)
    spec = attnspec.parse(f"attention s {{ {TEXTS['blocks']} }}")
    with pytest.warns(UserWarning, match='they count from the padding.*positions="real"'):
        convert(model, spec).model(tokens(4, N), attention_mask=mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model, spec, positions="real").model(tokens(4, N), attention_mask=mask)
    with pytest.raises(attnspec.AttnSpecError, match='"absolute" or "real"'):
        convert(model, spec, positions="left")


def test_a_whole_pass_is_one_graph() -> None:
    spec = attnspec.parse(f"attention s {{ {TEXTS['sinks']} }}")
    module, real = spec.compile(), real_of(left=True).bool()
    q, k, v = (torch.randn(4, 2, N, 8) for _ in range(3))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, real: torch.Tensor) -> Any:
        run = RealRunning(Running(module), real, moved=False)
        return run(q, k, v, key_padding_mask=real, inputs=None, layer=0)

    traced = torch.compile(call, backend="eager", fullgraph=True)
    assert difference(traced(q, k, v, real), call(q, k, v, real)) < 1e-6


def test_layers_that_share_keys_have_states_of_their_own() -> None:
    config = hf.Gemma3nTextConfig(
        **{"num_hidden_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8},
        num_key_value_heads=2,
        intermediate_size=[64] * 4,
        vocab_size=61,
        vocab_size_per_layer_input=61,
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=2,
        sliding_window=8,
        laurel_rank=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        activation_sparsity_pattern=[0.0] * 4,
        altup_num_inputs=2,
    )
    model, ids = hf.Gemma3nForCausalLM(config).eval(), tokens(2, 12)
    layers = "layer 2 { attend window(before = 5, after = 0) }"
    text = f"attention g {{ causal layers 4 attend window(before = 2, after = 0) {layers} }}"
    convert(model, attnspec.parse(text))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        cache = SpecCache(model)
        rows = [model(input_ids=x, past_key_values=cache).logits for x in torch.split(ids, 5, 1)]
    assert difference(torch.cat(rows, 1), whole) < 1e-5
