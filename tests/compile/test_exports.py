"""Graphs for other libraries: each format says the pairs of the spec, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import attnspec
from attnspec.compile.exports import flex_masks
from attnspec.compile.exports.blocks import cover_of
from attnspec.compile.standalone.page import StandaloneError
from attnspec.graphs.relation import EMPTY, FULL, SOME
from attnspec.spec import Spec
from attnspec.text.diagnostics import AttnSpecError


def spec_of(text: str) -> Spec:
    return attnspec.parse(f"attention a {{ {text} }}")


SPECS = [
    "attend full",
    "causal attend full",
    "attend window(before = 20, after = 3)",
    "causal attend window(before = 9, after = 0) | columns(first(4))",
    "attend window(radius = 3) | global(positions(0, 17, 40..42))",
    "causal attend strided(stride = 8)",
    "attend block(size = 16, before = 1) | random_blocks(size = 8, blocks = 1, seed = 3)",
    "attend where(q < 40 and k >= 10)",
    "heads 2 attend window(radius = 3 * head) | random(keys = 2, seed = 1)",
    "attend where(k == n - 1 - q) | window(radius = isqrt(n))",
]

LENGTHS = (1, 64, 130)


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize(("n", "block"), [(0, 4), (1, 4), (7, 16), (130, 16), (130, 1)])
def test_block_rows_are_the_pairs(text: str, n: int, block: int) -> None:
    spec = spec_of(text)
    found, mask = spec.to_bsr(n, block), spec.mask(n)
    assert (found.dense() == mask).all()
    assert found.mask.any((1, 2)).all()
    assert (
        found.full == [part.sum() == _pairs(found, at, n) for at, part in enumerate(found.mask)]
    ).all()
    bits = np.unpackbits(found.packed_mask, bitorder="little")
    assert (bits[: found.mask.size] == found.mask.ravel()).all()


def _pairs(found: object, at: int, n: int) -> int:
    """How many pairs the block `at` could have."""
    rows, size = np.diff(found.indptr), found.size  # type: ignore[attr-defined]
    row, column = np.repeat(np.arange(len(rows)), rows)[at], found.indices[at]  # type: ignore[attr-defined]
    return int(min(size, n - row * size) * min(size, n - column * size))


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("n", LENGTHS)
def test_a_mask_function_and_its_blocks_are_the_pairs(text: str, n: int) -> None:
    spec = spec_of(text)
    flex = spec.to_flex(n)
    heads = spec.heads or 1
    found = create_mask(flex.mask_mod, 1, heads, n, n, device="cpu")[0].numpy()
    for head in range(heads):
        assert (found[head] == spec.mask(n, head=head)).all()
    blocks = flex.block_mask()
    meant = create_block_mask(flex.mask_mod, 1, heads, n, n, "cpu")
    assert blocks.seq_lengths == (n, n)
    assert torch.equal(blocks.to_dense(), meant.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(blocks, name), getattr(meant, name))


def test_a_mask_prints_on_one_line() -> None:
    spec = attnspec.parse("attention near { layers 2 attend window(radius = 2) }")
    assert repr(spec.to_flex(4096, layer=1)) == "<FlexMask near, layer 1, n = 4,096>"
    assert repr(spec.to_flex()) == "<FlexMask near, layer 0, every n>"


def test_one_mask_function_serves_every_length_that_it_can() -> None:
    flex = spec_of("causal attend window(before = 9, after = 0)").to_flex()
    for n in LENGTHS:
        meant = spec_of("attend window(before = 9, after = 0)").mask(n)
        assert (create_mask(flex.mask_mod, 1, 1, n, n, device="cpu")[0, 0].numpy() == meant).all()
        assert flex.block_mask(n).seq_lengths == (n, n)


@pytest.mark.parametrize(
    "text",
    [
        "attend global(last(2))",
        "attend random(keys = 2, seed = 0)",
        "attend window(radius = n // 8)",
    ],
)
def test_pairs_that_depend_on_the_length_ask_for_it(text: str) -> None:
    flex = spec_of(text).to_flex()
    with pytest.raises(ValueError, match=r"to_flex\(n\)"):
        _ = flex.mask_mod
    with pytest.raises(ValueError, match=r"block_mask\(n\)"):
        flex.block_mask()
    assert (
        create_mask(flex.block_mask(40).mask_mod, 1, 1, 40, 40, device="cpu")[0, 0].numpy()
        == spec_of(text).mask(40)
    ).all()


def test_inputs_come_a_batch_at_a_time() -> None:
    spec = spec_of("input d: ids input p: length causal attend same(d) | prefix(p)")
    ids, lengths = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]]), torch.tensor([1, 3])
    flex = spec.to_flex(5, inputs={"d": ids, "p": lengths})
    found = create_mask(flex.mask_mod, 2, 1, 5, 5, device="cpu")[:, 0].numpy()
    for sample in range(2):
        inputs: dict[str, Any] = {"d": ids[sample].numpy(), "p": int(lengths[sample])}
        assert (found[sample] == spec.mask(5, inputs=inputs)).all()
    assert flex.block_mask().kv_num_blocks.shape[0] == 2


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_spec() -> None:
    spec = spec_of("heads 2 causal attend window(before = 20, after = 0) | columns(every(16))")
    q, k, v = torch.randn(3, 1, 2, 70, 8, generator=torch.Generator().manual_seed(1)).double()
    found = flex_attention(q, k, v, block_mask=spec.to_flex(70).block_mask())
    torch.testing.assert_close(found, spec.compile()(q, k, v))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "body",
    [
        "heads 2 causal attend window(before = 20, after = 0) score alibi(slopes = [0.3, 0.7])",
        "heads 2 attend residue(step = 3) score softcap(cap = 2) score alibi() scale 1 / n",
        "layers 2 attend full layer 1 { attend full scale 0.7 score softcap(cap = 1) }",
        "attend full",
    ],
)
def test_scores_are_changed_as_the_spec_says(body: str) -> None:
    spec = spec_of(body)
    q, k, v = torch.randn(3, 1, 2, 70, 8, generator=torch.Generator().manual_seed(1)).double()
    layer = spec.layers - 1
    flex = spec.to_flex(70, layer=layer, heads=2)
    assert (flex.score_mod is None) == (body == "attend full")
    found = flex_attention(
        q, k, v, score_mod=flex.score_mod, block_mask=flex.block_mask(), scale=flex.scale(8)
    )
    torch.testing.assert_close(found, spec.compile()(q, k, v, layer=layer))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("attend full normalize relu", "`normalize relu` is no softmax"),
        ("heads 2 attend full score bias(buckets = 8, max_distance = 9)", "is learned"),
        ("heads 2 attend full head 1 { attend self score softcap(cap = 2) }", "different ways"),
    ],
)
def test_scores_that_are_no_function_are_refused(body: str, why: str) -> None:
    flex = spec_of(body).to_flex(9)
    assert create_mask(flex.mask_mod, 1, 2, 9, 9, "cpu").any()
    with pytest.raises(AttnSpecError, match=f"the scores of `.*` have no function: .*{why}"):
        _ = flex.score_mod


def test_a_scale_of_the_length_needs_one() -> None:
    spec = spec_of("attend full scale 1 / n")
    assert spec.to_flex(50).scale(8) == 0.02
    with pytest.raises(ValueError, match="depends on n"):
        spec.to_flex().scale(8)


def test_what_no_formula_says_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> str:
        raise StandaloneError("no formula")

    monkeypatch.setattr(flex_masks, "graph_module", refuse)
    spec = spec_of("heads 2 attend window(radius = 2 + head) | global(first(2))")
    flex = spec.to_flex(150)
    found = create_mask(flex.mask_mod, 1, 2, 150, 150, device="cpu")[0].numpy()
    for head in range(2):
        assert (found[head] == spec.mask(150, head=head)).all()
    with pytest.raises(ValueError, match=r"to_flex\(n\)"):
        _ = spec.to_flex().mask_mod


@pytest.mark.slow
@zoo.every_attention
def test_every_spec_of_the_zoo_is_handed_over_or_refused(path: Path, name: str) -> None:
    spec = zoo.smaller(path, name)
    n = spec.program.fixed_length or 200
    inputs, heads, flex, reason = zoo.sample(spec, n), spec.heads or 2, None, ""
    try:
        flex = spec.to_flex(n, inputs=inputs, heads=heads)
    except AttnSpecError as error:
        reason = str(error)
    if flex is None:
        assert "mechanism" in reason or "decided by the tensors" in reason
        return
    found = create_mask(flex.mask_mod, 1, heads, n, n, device="cpu")[0].numpy()
    for head in range(heads):
        mask = spec.mask(n, head=head, inputs=inputs)
        assert (found[head] == mask).all()
        assert (spec.to_bsr(n, 16, head=head, inputs=inputs).dense() == mask).all()
    meant = create_block_mask(flex.mask_mod, 1, heads, n, n, "cpu")
    assert torch.equal(flex.block_mask().to_dense(), meant.to_dense())


# --- formats --------------------------------------------------------------------------------------


def test_blocks_are_classified_exactly() -> None:
    relation = spec_of("attend where(q < 40 and (q - k) % 2 == 0 or k < 16)").relation(70)
    found = cover_of(relation, 70, 16, 16)
    mask = np.asarray(relation.holds(np.arange(70)[:, None], np.arange(70)[None], 70))
    for i, j in np.ndindex(*found.shape):
        part = mask[16 * i : 16 * i + 16, 16 * j : 16 * j + 16]
        assert found[i, j] == (FULL if part.all() else SOME if part.any() else EMPTY)


@pytest.mark.parametrize(
    ("text", "said", "words"),
    [
        ("attend topk(keys = 3)", {}, "decided by the tensors"),
        ("attend favor(features = 8, seed = 0)", {}, "mechanism"),
        ("input d: ids attend same(d)", {}, "needs its inputs d, got none"),
        ("attend full", {"inputs": {"x": [1]}}, "got x"),
        ("heads 2 attend full", {"heads": 3}, "2 heads"),
        ("attend full", {"layer": 1}, None),
        ("layers 2 attend full", {"layer": 2}, "between 0 and 1"),
        ("input d: ids attend same(d)", {"inputs": {"d": np.zeros((1, 1, 4), int)}}, "one sample"),
    ],
)
def test_what_flex_cannot_have_is_refused(
    text: str, said: dict[str, object], words: str | None
) -> None:
    if words is None:
        assert spec_of(text).to_flex(4, **said).n == 4  # type: ignore[arg-type]
        return
    with pytest.raises(AttnSpecError, match=words):
        spec_of(text).to_flex(4, **said)  # type: ignore[arg-type]


def test_too_much_is_refused() -> None:
    with pytest.raises(AttnSpecError, match="larger blocks"):
        spec_of("attend full").to_bsr(10_000, 1)
    with pytest.raises(AttnSpecError, match="smaller blocks"):
        spec_of("attend full").to_bsr(40_000, 64)
    with pytest.raises(AttnSpecError, match="at least 1"):
        spec_of("attend full").to_bsr(4, 0)


@pytest.mark.parametrize(
    "graph",
    [
        "where(abs(q * n - k * m) <= 2 * m)",
        "where(q + 2 * k < n and q < n)",
        "rows(last(2)) | shift(full, by = -3)",
        "window(radius = 5) | global(last(1))",
    ],
)
@pytest.mark.parametrize(("m", "n"), [(8, 8), (5, 8), (200, 130), (128, 256), (300, 7)])
def test_flex_takes_queries_of_another_sequence(graph: str, m: int, n: int) -> None:
    spec = spec_of(f"cross attend {graph}")
    flex, meant = spec.to_flex(n, m=m), spec.mask(n, m=m)
    assert (create_mask(flex.mask_mod, 1, 1, m, n, "cpu")[0, 0].numpy() == meant).all()
    blocks, listed = flex.block_mask(), create_block_mask(flex.mask_mod, 1, 1, m, n, "cpu")
    assert blocks.seq_lengths == (m, n)
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks"):
        assert torch.equal(getattr(blocks, name), getattr(listed, name))
    assert torch.equal(blocks.to_dense(), listed.to_dense())
    assert spec.to_flex().block_mask(n, m=m).seq_lengths == (m, n)


def test_one_mask_function_serves_all_lengths_of_both_sequences() -> None:
    spec = spec_of("cross attend window(radius = 2)")
    mask_mod = spec.to_flex().mask_mod
    for m, n in ((3, 9), (9, 3)):
        found = create_mask(mask_mod, 1, 1, m, n, "cpu")[0, 0].numpy()
        assert (found == spec.mask(n, m=m)).all()
    with pytest.raises(ValueError, match=r"to_flex\(n, m=m\)"):
        _ = spec_of("cross attend rows(last(2))").to_flex().mask_mod
    with pytest.raises(ValueError, match="m queries read a number of keys"):
        spec.to_flex(m=4)
    with pytest.raises(AttnSpecError, match="one sequence"):
        spec_of("attend full").to_flex(4, m=4)


@pytest.mark.parametrize("times", [[1, 5, 2, 2, 9], [1.0, float("nan"), 0.5, float("inf"), 2.0]])
def test_flex_compares_numbers(times: list[float]) -> None:
    spec = spec_of("input t: numbers attend where(t(k) <= t(q) and t(k) == t(k))")
    inputs = {"t": np.array(times)}
    found = create_mask(spec.to_flex(5, inputs=inputs).mask_mod, 1, 1, 5, 5, "cpu")[0, 0].numpy()
    assert (found == spec.mask(5, inputs=inputs)).all()


@pytest.mark.parametrize("m", [0, 1, 5, 8, 19])
def test_blocks_of_two_sequences(m: int) -> None:
    for graph in ("where(q + 2 * k < m)", "where(q + 2 * k < n)", "window(radius = 2)", "full"):
        spec, n = spec_of(f"cross attend {graph}"), 11
        meant = spec.mask(n, m=m)
        found = spec.to_bsr(n, 4, m=m)
        assert len(found.indptr) == -(-m // 4) + 1
        assert found.dense().shape == (m, n)
        assert (found.dense() == meant).all()
    with pytest.raises(AttnSpecError, match="one sequence"):
        spec_of("attend full").to_bsr(n, 4, m=m)
