"""Graphs for other libraries, whose pairs the views hold: scores, lengths, two sequences, refusals;
and plain operations under torch.export with a dynamic n."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import exported, imported
from population import BODIES, spec_of
from sweeps import few
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from views import Call, Case, errors, numbers

from attnspec import parse

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


IN_FLEX = (
    *("full", "softcap", "slopes", "alibi", "documents", "times", "by layer", "scale of n"),
    *("score of distances", "score of inputs", "score of pairs", "score that hides"),
)


@pytest.mark.parametrize("name", few(IN_FLEX, 4))
def test_flex_attention_computes_the_spec(name: str) -> None:
    spec = spec_of(BODIES[name])
    call = Call(Case(spec, 70), "plain", torch.float64, spec.layers - 1)
    heads = call.tensors[0].shape[1]
    flex = spec.to_flex(70, call.layer, call.keywords.get("inputs"), heads)
    assert (flex.score_mod is None) == ("score" not in BODIES[name])
    more: Any = {"score_mod": flex.score_mod, "scale": flex.scale(6)}
    with torch.no_grad():
        parts = [x.detach() for x in call.tensors]
        attend: Any = flex_attention
        found = attend(*parts, block_mask=flex.block_mask(), **more)
    meant = call.meant(torch.float64, False)[0]
    assert errors([found], [meant], [meant]) == []


def test_one_mask_function_serves_every_length_that_it_can() -> None:
    flex = spec_of("causal attend window(before = 9, after = 0)").to_flex()
    for n in (1, 64, 130):
        meant = spec_of("attend window(before = 9, after = 0)").mask(n)
        assert (create_mask(flex.mask_mod, 1, 1, n, n, device="cpu")[0, 0].numpy() == meant).all()
        assert flex.block_mask(n).seq_lengths == (n, n)
    for graph in ("global(last(2))", "random(keys = 2, seed = 0)", "window(radius = n // 8)"):
        spec = spec_of(f"attend {graph}")
        with pytest.raises(ValueError, match=r"to_flex\(n\)"):
            _ = spec.to_flex().mask_mod
        with pytest.raises(ValueError, match=r"block_mask\(n\)"):
            spec.to_flex().block_mask()
        found = create_mask(spec.to_flex().block_mask(40).mask_mod, 1, 1, 40, 40, device="cpu")
        assert (found[0, 0].numpy() == spec.mask(40)).all()
    assert spec_of("attend full scale 1 / n").to_flex(50).scale(8) == 0.02
    with pytest.raises(ValueError, match="depends on n"):
        spec_of("attend full scale 1 / n").to_flex().scale(8)
    near = parse("attention near { layers 2 attend window(radius = 2) }")
    assert repr(near.to_flex(4096, layer=1)) == "<FlexMask near, layer 1, n = 4,096>"


@pytest.mark.parametrize(
    "graph",
    [
        "where(abs(q * n - k * m) <= 2 * m)",
        "where(q + 2 * k < n and q < n)",
        "rows(last(2)) | shift(full, by = -3)",
        "window(radius = 5) | global(last(1))",
    ],
)
def test_masks_of_two_sequences(graph: str) -> None:
    spec = spec_of(f"cross attend {graph}")
    for m, n in ((8, 8), (5, 8), (200, 130), (300, 7), (0, 11)):
        meant = spec.mask(n, m=m)
        found = spec.to_bsr(n, 4, m=m)
        assert len(found.indptr) == -(-m // 4) + 1
        assert found.dense().shape == (m, n)
        assert (found.dense() == meant).all()
        rows = np.repeat(np.arange(len(found.indptr) - 1), np.diff(found.indptr))
        places = np.minimum(4, m - 4 * rows) * np.minimum(4, n - 4 * found.indices)
        assert (found.full == (found.mask.sum((1, 2)) == places)).all()
        if not m:
            continue
        flex = spec.to_flex(n, m=m)
        held = create_mask(flex.mask_mod, 1, 1, m, n, "cpu")[0, 0]
        assert (held.numpy() == meant).all()
        blocks, listed = flex.block_mask(), create_block_mask(flex.mask_mod, 1, 1, m, n, "cpu")
        assert blocks.seq_lengths == (m, n)
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks"):
            assert torch.equal(getattr(blocks, name), getattr(listed, name))
        assert spec.to_flex().block_mask(n, m=m).seq_lengths == (m, n)
    with pytest.raises(ValueError, match="needs n, the number of keys"):
        spec.to_flex(m=4)


def test_full_blocks_of_pairs_without_a_formula_are_not_listed() -> None:
    n = 49_152  # whose pairs by blocks are more than `LIMITS.mask_bytes`
    mod = spec_of("causal attend where([1, 5, 9][q % 3] + k >= 9)").to_flex(n).mask_mod
    q, k = torch.randint(n, (1000,)), torch.randint(n, (1000,))
    q[:9], k[:9] = torch.arange(9), torch.arange(9)[[4, 0, 0, 3, 4, 1, 6, 4, 0]]
    meant = (k <= q) & (torch.tensor([1, 5, 9])[q % 3] + k >= 9)
    assert torch.equal(mod(0, 0, q, k), meant)


@pytest.mark.parametrize("times", [[1, 5, 2, 2, 9], [1.0, float("nan"), 0.5, float("inf"), 2.0]])
def test_flex_compares_numbers(times: list[float]) -> None:
    spec = spec_of("input t: numbers attend where(t(k) <= t(q) and t(k) == t(k))")
    inputs = {"t": np.array(times)}
    found = create_mask(spec.to_flex(5, inputs=inputs).mask_mod, 1, 1, 5, 5, "cpu")[0, 0].numpy()
    assert (found == spec.mask(5, inputs=inputs)).all()


EXPORTED = (
    "input p: length causal attend full | prefix(p) score alibi()",
    "attend window(radius = 3)",
    "attend dilated(radius = 3, step = 2)",
    "attend block(size = 5) | shift(block(size = 4), by = 1)",
    "attend fixed(stride = 4, cells = 1)",
    "attend window(radius = 2) | global(first(1) | last(2))",
    "attend where(abs(q - k) % 3 == 0 or k < n // 2)",
    "attend powers(base = 3)",
    "attend transpose(window(before = 3, after = 0)) - columns(first(1))",
    "heads 2 causal attend full head 1 { attend block(size = max(1, n // 8)) }",
    "input doc: ids causal attend same(doc)",
    "input t: tokens attend window(radius = 2) | global(t)",
    "heads 2 causal attend window(before = 3, after = 0) score bias(buckets = 8)",
    "causal attend window(before = 3, after = 0) score softcap(cap = 5) normalize softmax1",
    "causal attend window(before = 3, after = 0) normalize relu",
    "attend linear()",
    "attend fourier()",
    "input x: numbers attend where(x(k) + 1 < x(q))",
    "heads 2 attend full score s * [0.5, 1][head] + [n, 2][q % 2] / n score 4 * tanh(s / 4)",
    "input x: numbers causal attend full score s - abs(x(q) - x(k)) / 9 + log(1 + k)",
)
HERE = [
    body
    for body in (*EXPORTED, "attend where(k % n < max(1, n // 4) or q >= n / 2)")
    if not any(x in body for x in ("linear", "fourier", "powers", "size =", "x(k)", "s *"))
]
SLOW = pytest.mark.slow


def inputs_of(body: str, n: int) -> dict[str, Tensor]:
    at = torch.arange(n)[None]
    every = {"doc": at // 4, "p": torch.tensor([5]), "t": at % 7 == 0, "x": at * 2 % 9}
    return {name: x for name, x in every.items() if f"input {name}:" in body}


def check(module: Any, body: str, strict: bool = False) -> None:
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    program = exported(module.eval(), inputs_of(body, 33), strict)
    for n in (2, 9, 150):
        parts, inputs = numbers((3, 1, 2, n, 8), n).float(), inputs_of(body, n)
        torch.testing.assert_close(program(*parts, inputs), module(*parts, inputs=inputs))


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("body", few(EXPORTED, EXPORTED[:1]))
def test_a_file_that_stands_alone_is_exported_for_every_length(
    body: str, strict: bool, tmp_path: Path
) -> None:
    made = imported(spec_of(body).emit(standalone=True), tmp_path).Sample
    check(made(8) if "head_size" in signature(made).parameters else made(), body, strict)


@pytest.mark.parametrize("body", few(HERE, HERE[-1:]))
def test_plain_operations_in_this_process_are_exported_for_every_length(body: str) -> None:
    check(spec_of(body).compile(), body)
