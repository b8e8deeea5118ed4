"""Positions that count real tokens: padding, wherever it stands, changes nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from sweeps import few
from tiny_models import difference, hidden, llama, tokens
from tiny_models import transformers as hf
from torch import Tensor

import attnspec
from attnspec.integrations.transformers import SpecCache, convert, with_inputs

LENGTHS = (17, 11, 4, 11)
N, NEW = 17, 6
STARTS = torch.tensor([N - length for length in LENGTHS])
BODIES = {
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
REAL = (torch.arange(N) >= STARTS[:, None]).long()
"""Padding stands on the left; on the right it is `REAL.flip(1)`."""


def spec_of(kind: str) -> attnspec.Spec:
    return attnspec.parse(f"attention {kind} {{ {BODIES[kind]} }}")


def inputs_of(kind: str, rows: int, shift: Tensor) -> dict[str, Any]:
    """The input of a text, of so many positions, whose samples begin at `shift`."""
    at = torch.arange(rows) - shift[:, None]
    if kind == "documents":
        return {"x": torch.where(at < 0, 9, at // 5)}
    if kind == "chosen":
        return {"x": torch.where(at >= 2, at - 2 + shift[:, None], -1)[:, None, :, None]}
    return {}


def rows_of(model: Any, ids: Any, inputs: Any, mask: Any = None, cache: Any = None) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    more = {"attnspec_inputs": inputs} if inputs else {}
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=at, past_key_values=cache, **more)
    return out.logits  # type: ignore[no-any-return]


def apart(padded: Tensor, alone: list[Tensor]) -> float:
    pairs = zip(padded, alone, strict=True)
    return max(difference(x[N - y.shape[1] :], y[0]) for x, y in pairs)


@pytest.mark.parametrize("kind", few(BODIES))
def test_padding_takes_no_position(kind: str) -> None:
    model, ids = llama("eager"), tokens(4, N)
    done = convert(model, spec_of(kind), positions="real")
    alone = [
        rows_of(model, ids[b : b + 1, N - n :], inputs_of(kind, n, STARTS[:1] * 0))
        for b, n in enumerate(LENGTHS)
    ]
    ids, inputs = ids * REAL, inputs_of(kind, N, STARTS)
    assert apart(rows_of(model, ids, inputs, REAL), alone) < 1e-5
    caches: tuple[Any, ...] = (
        hf.StaticCache(config=model.config, max_cache_len=N + NEW),
        hf.DynamicCache(),
        SpecCache(model),
    )
    for cache in caches if kind != "lengths" else ():
        rows = []
        for first, end in ((0, 5), (5, N - 1), (N - 1, N)):
            here = {x: t[:, :, first:end] if t.ndim > 2 else t[:, :end] for x, t in inputs.items()}
            rows.append(rows_of(model, ids[:, first:end], here, REAL[:, :end], cache))
        assert apart(torch.cat(rows, 1), alone) < 1e-5
    if inputs:
        with with_inputs(done, inputs_of(kind, N + NEW, STARTS)):
            model.generate(ids, attention_mask=REAL, max_new_tokens=NEW)


@pytest.mark.parametrize("how", few(["static", "dynamic", "beams", "spec"]))
def test_padded_samples_write_as_alone(how: str) -> None:
    model = llama("eager")
    convert(model, spec_of("sinks"), positions="real")
    ids = tokens(4, N) * REAL

    def write(ids: Tensor, mask: Tensor) -> Tensor:
        more: dict[str, Any] = {"cache_implementation": "static"} if how == "static" else {}
        more |= {"past_key_values": SpecCache(model)} if how in ("spec", "beams") else {}
        more |= {"num_beams": 3} if how == "beams" else {}
        settings = {"attention_mask": mask, "max_new_tokens": NEW, "do_sample": False}
        return model.generate(ids, **settings, **more)[:, ids.shape[1] :]  # type: ignore[no-any-return]

    rows = [write(ids[b : b + 1, N - x :], REAL[b : b + 1, N - x :]) for b, x in enumerate(LENGTHS)]
    assert (write(ids, REAL) == torch.cat(rows)).all()


def test_tokens_after_padding_on_the_right() -> None:
    model, real = llama("eager"), REAL.flip(1)
    ids, new, more = tokens(4, N) * real, tokens(4, 3), torch.ones(4, 3, dtype=torch.long)
    with convert(model, spec_of("sinks"), positions="real"):
        cache = hf.DynamicCache()
        whole = rows_of(model, ids, {}, real, cache)
        rows = rows_of(model, new, {}, torch.cat([real, more], 1), cache)
        for b, length in enumerate(LENGTHS):
            joined = hidden(model, torch.cat([ids[b : b + 1, :length], new[b : b + 1]], 1))[0]
            assert difference(whole[b, :length], joined[:-3]) < 1e-5
            assert difference(rows[b], joined[-3:]) < 1e-5
    convert(model, spec_of("sinks"))
    cache = hf.DynamicCache()
    rows_of(model, ids, {}, real, cache)
    with pytest.warns(UserWarning, match='padding between tokens shifts .*positions="real"'):
        rows_of(model, new, {}, torch.cat([real, more], 1), cache)


def test_the_warning_names_real_positions() -> None:
    model, spec = llama("eager"), spec_of("blocks")
    with pytest.warns(
        UserWarning,
        match='padding on the left shifts .*positions="real"',
    ):
        convert(model, spec).model(tokens(4, N), attention_mask=REAL)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model, spec, positions="real").model(tokens(4, N), attention_mask=REAL)
    with pytest.raises(attnspec.AttnSpecError, match='"absolute" or "real"'):
        convert(model, spec, positions="left")
