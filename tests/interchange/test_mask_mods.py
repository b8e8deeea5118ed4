"""Mask functions of torch as specs: what is written of them, the pairs, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks

import attnspec
from attnspec.interchange.mask_mods import from_mask_mod
from attnspec.interchange.traced import constants
from attnspec.ir.scalars import Apply
from attnspec.spec import Spec
from attnspec.text.diagnostics import AttnSpecError

DOC = torch.tensor([0, 0, 0, 3, 3, 1, 1, 1, 1, 4, 4, 4, 4, 4, 2, 2, 2])
MARKED = torch.arange(17) % 5 == 2
STEPS, DOUBLED = torch.tensor([4, 8, 12]), torch.tensor([2, 4, 8])
WIDTHS = torch.tensor([1, 2, 8])
ids = [torch.stack([DOC, DOC.flip(0)])]
parts = {"by": (MARKED, DOC.clone())}
TOGETHER: Any = (DOC.clone(), MARKED, DOC.flip(0))
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
DIAGONAL = torch.eye(17, dtype=torch.bool)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def near(b: Any, h: Any, q: Any, k: Any) -> Any:
    return abs(q - k) <= 3


def widths(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < WIDTHS[h])


def in_place(b: Any, h: Any, q: Any, k: Any) -> Any:
    held = q >= k
    q = q.clone()
    q -= 4
    held &= k > q
    return held


def block_diffusion(b: Any, h: Any, q: Any, k: Any) -> Any:
    noisy_q, noisy_k = q < 16, k < 16
    block_q = torch.where(noisy_q, q // 4, (q - 16) // 4)
    block_k = torch.where(noisy_k, k // 4, (k - 16) // 4)
    own = (block_q == block_k) & (noisy_q == noisy_k)
    clean = (block_q > block_k) & noisy_q & ~noisy_k
    return own | clean | ((block_q >= block_k) & ~noisy_q & ~noisy_k)


WRITTEN: dict[str, tuple[Callable[..., Any], str]] = {
    "times one": (lambda b, h, q, k: k * 1 <= q // 1, "attend causal"),
    "nothing added": (lambda b, h, q, k: k + 0 <= q - 0, "attend causal"),
    "both sides": (
        lambda b, h, q, k: (k % 7 == 3) & (q % 5 == 1),
        "attend where(k % 7 == 3 and q % 5 == 1)",
    ),
    "causal": (causal, "attend causal"),
    "everything": (lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool), "attend full"),
    "new_ones": (lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & (k <= q), "attend causal"),
    "window": (near, "attend window(radius = 3)"),
    "causal window": (
        lambda b, h, q, k: (q >= k) & (q - k <= 256),
        "attend window(before = 256, after = 0)",
    ),
    "keys": (lambda b, h, q, k: (q >= k) & (k > q - 7), "attend window(before = 6, after = 0)"),
    "and_masks": (and_masks(causal, near), "attend window(before = 3, after = 0)"),
    "of one name": (
        lambda b, h, q, k: (q % 3 == 0) & ((q - k).abs() <= 3),
        "attend where(q % 3 == 0) & window(radius = 3)",
    ),
    "or_masks": (or_masks(causal, near), "attend causal | window(radius = 3)"),
    "prefix": (lambda b, h, q, k: (q >= k) | (k < 7), "attend causal | columns(first(7))"),
    "chunks": (
        lambda b, h, q, k: (q // 64 == k // 64) & (q >= k),
        "causal attend block(size = 64)",
    ),
    "shift of bits": (lambda b, h, q, k: (q >> 3) == (k >> 3), "attend block(size = 8)"),
    "dilated": (
        lambda b, h, q, k: ((q - k).abs() <= 9) & ((q - k).abs() % 3 == 0),
        "attend dilated(radius = 9, step = 3)",
    ),
    "residues": (lambda b, h, q, k: (q - k) % 5 == 0, "attend residue(step = 5)"),
    "documents": (
        lambda b, h, q, k: (DOC[q] == DOC[k]) & (q >= k),
        "input doc: ids causal attend same(doc)",
    ),
    "documents near by": (
        lambda b, h, q, k: (DOC[q] == DOC[k]) & (q >= k) & (q - k < 4),
        "input doc: ids causal attend same(doc) & window(before = 3, after = 0)",
    ),
    "sinks": (
        lambda b, h, q, k: (q >= k) & ((q - k < 32) | (k < 4) | (k % 16 == 0)),
        "causal attend window(before = 31, after = 0) | columns(first(4)) | columns(every(16))",
    ),
    "marked keys beside a window": (
        lambda b, h, q, k: (q >= k) & ((q - k <= 4) | MARKED[k]),
        "input marked: tokens causal attend window(before = 4, after = 0) | columns(marked)",
    ),
    "marked": (
        lambda b, h, q, k: near(b, h, q, k) | MARKED[q] | MARKED[k],
        "input marked: tokens attend window(radius = 3) | global(marked)",
    ),
    "marked alone": (
        lambda b, h, q, k: MARKED[q] | MARKED[k],
        "input marked: tokens attend global(marked)",
    ),
    "clamp": (
        lambda b, h, q, k: (q.clamp(2, 14) - k).abs() <= 2,
        "attend where(abs(min(max(q, 2), 14) - k) <= 2)",
    ),
    "where of numbers": (
        lambda b, h, q, k: k <= torch.where(q < 8, 7, q),
        "attend rows(first(8)) & columns(first(8)) | where(q >= 8) & causal",
    ),
    "two keys": (
        lambda b, h, q, k: (q >= k) & (q - k < 2),
        "attend window(before = 1, after = 0)",
    ),
    "in place": (in_place, "attend window(before = 3, after = 0)"),
    "half of a sum": (lambda b, h, q, k: (q + k) / 2 <= 5.5, "attend where((q + k) / 2 <= 5.5)"),
    "reals of 64 bits": (
        lambda b, h, q, k: (q.double() * 0.29).floor() == (k.double() * 0.29).floor(),
        "attend where(floor(q * 0.29) == floor(k * 0.29))",
    ),
    "powers of the head": (lambda b, h, q, k: q - k < 2**h, "attend where(q - k < 2 ** head)"),
    "minimum": (lambda b, h, q, k: torch.minimum(q, k) < 2, "attend where(min(q, k) < 2)"),
    "different": (lambda b, h, q, k: ~(q == k), "attend where(q != k)"),
    "one row of several": (
        lambda b, h, q, k: DOC[None][0, q] == DOC[None][0, k],
        "input doc: ids attend same(doc)",
    ),
    "clamps that change nothing": (
        lambda b, h, q, k: DOC[q.clamp(0, 16)] == DOC[torch.where(k < 17, k, 16)],
        "input doc: ids attend same(doc)",
    ),
    "a flag compared with 1": (
        lambda b, h, q, k: torch.where((q >= 6) == 1, (q - 6) // 4, q // 4) == k // 4,
        "attend where(q >= 6 and (q - 6) // 4 == k // 4) | rows(first(6)) & block(size = 4)",
    ),
    "flags alike": (
        lambda b, h, q, k: (q >= 6) == (k >= 6),
        "attend where(q >= 6 and k >= 6) | rows(first(6)) & columns(first(6))",
    ),
    "always": (lambda b, h, q, k: q // 4 % 1 == k // 4 % 1, "attend full"),
    "marks compared with 1": (
        lambda b, h, q, k: (MARKED[q] == 1) | (MARKED[k].int() == 1),
        "input marked: tokens attend global(marked)",
    ),
    "a number by a mark": (
        lambda b, h, q, k: q - k < torch.where(MARKED[k], 5, 2),
        "input marked: tokens attend columns(marked) & where(q - k < 5)"
        " | ~columns(marked) & where(q - k < 2)",
    ),
    "no division of what is negative": (
        lambda b, h, q, k: torch.div(q, 4, rounding_mode="trunc") == torch.fmod(k, 4),
        "attend where(q // 4 == k % 4)",
    ),
    "members": (
        lambda b, h, q, k: torch.isin(k, WIDTHS) | ~torch.isin(q - k, WIDTHS),
        "attend where(k in {1, 2, 8} or not q - k in {1, 2, 8})",
    ),
    "buckets": (
        lambda b, h, q, k: torch.bucketize(q, WIDTHS[1:], right=True) > (k > 5).int(),
        "attend where(q in 2..7) & columns(first(6)) | where(q >= 8)",
    ),
    "buckets of one width": (
        lambda b, h, q, k: torch.bucketize(q, STEPS, right=True) == torch.searchsorted(STEPS, k),
        "attend where(min(q // 4, 3) == min(max((k - 1) // 4, 0), 3))",
    ),
    "buckets of several widths": (
        lambda b, h, q, k: torch.bucketize(q, DOUBLED) == torch.bucketize(k, DOUBLED),
        "attend rows(first(3)) & columns(first(3)) | where(q in 3..4 and k in 3..4)"
        " | where(q in 5..8 and k in 5..8) | where(q >= 9 and k >= 9)",
    ),
    "a bucket compared": (
        lambda b, h, q, k: torch.bucketize(q - k, DOUBLED) == torch.where(q < 4, 2, 1),
        "attend where(q - k in 3..4 and q >= 4) | where(q - k in 5..8) & rows(first(4))",
    ),
    "of heads": (
        lambda b, h, q, k: (q - k).abs() <= h,
        "attend where(abs(q - k) <= head)",
    ),
}


@cache
def found(name: str) -> Spec:
    return from_mask_mod(WRITTEN[name][0], name="found")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_function_is_written_so(name: str) -> None:
    text, spec = WRITTEN[name][1], found(name)
    assert " ".join(spec.source.split()) == f"attention found {{ {text} }}"


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("n", [1, 17])
def test_the_pairs_are_those_of_the_function(name: str, n: int) -> None:
    mask_mod, spec = WRITTEN[name][0], found(name)
    inputs = {
        key: value.numpy()[:n]
        for key, value in (("doc", DOC), ("marked", MARKED))
        if key in spec.inputs
    }
    meant = create_mask(mask_mod, 1, 3, n, n, device="cpu")[0].numpy()
    for head in range(3):
        assert (spec.mask(n, head=head, inputs=inputs) == meant[head]).all()


def test_a_table_of_heads_is_cases() -> None:
    spec = attnspec.from_mask_mod(widths)
    meant = create_mask(widths, 1, 3, 20, 20, device="cpu")[0].numpy()
    assert spec.heads == 3
    for head in range(3):
        assert (spec.mask(20, head=head) == meant[head]).all()


def test_samples_of_a_batch_share_a_spec() -> None:
    both = torch.stack([DOC, DOC.flip(0)])
    spec = from_mask_mod(lambda b, h, q, k: both[b, q] == both[b, k])
    assert {name: entry.kind for name, entry in spec.inputs.items()} == {"both": "ids"}


TENTHS = torch.tensor([0.1, 0.2, 0.3, 0.4])
TIMES = torch.tensor([0.5, 0.25, 3.0, 3.0, -1.0, 7.5, 0.25])

LENGTHS = torch.tensor([5, 0, 30])


class Padded:
    def __init__(self) -> None:
        self.seq_lens = LENGTHS
        self.ends = (torch.arange(24) // 6 + 1) * 6

    def prefix(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) | (k < self.seq_lens[b])

    def chunks(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < self.ends[q]) & (k >= self.ends[q] - 8)


SAMPLES: dict[str, tuple[Callable[..., Any], str]] = {
    "padding": (
        lambda b, h, q, k: (q >= k) & (k < LENGTHS[b]) & (q < LENGTHS[b]),
        "input lengths: length causal attend prefix(lengths) & transpose(prefix(lengths))",
    ),
    "padding before": (
        lambda b, h, q, k: LENGTHS.int()[b] <= k,
        "input lengths: length attend ~prefix(lengths)",
    ),
    "of a table": (
        lambda b, h, q, k: (k - LENGTHS[None].T[b, 0]) % 4 == 0,
        "input lengths: length attend where((k - lengths) % 4 == 0)",
    ),
    "method": (Padded().prefix, "input seq_lens: length attend causal | prefix(seq_lens)"),
    "arithmetic with a table": (
        Padded().chunks,
        "input ends: numbers attend where(k < ends(q)) & where(k >= ends(q) - 8)",
    ),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_numbers_of_samples_are_lengths_and_names_are_kept(name: str) -> None:
    mask_mod, text = SAMPLES[name]
    spec = from_mask_mod(mask_mod, name="found")
    assert " ".join(spec.source.split()) == f"attention found {{ {text} }}"
    meant = create_mask(lambda b, h, q, k: mask_mod(b, h, q, k), 3, 1, 24, 24, device="cpu")[:, 0]
    values: dict[str, Any] = {
        "lengths": LENGTHS,
        "seq_lens": LENGTHS,
        "ends": [Padded().ends.numpy()] * 3,
    }
    for sample in range(3):
        read = {key: values[key][sample] for key in spec.inputs}
        assert (spec.mask(24, inputs=read) == meant[sample].numpy()).all()


NUMBERS: dict[str, tuple[Callable[..., Any], dict[str, str]]] = {
    "order of reals": (lambda b, h, q, k: TIMES[k] <= TIMES[q], {"times": "numbers"}),
    "equal reals": (lambda b, h, q, k: TIMES[k] == TIMES[q], {"times": "numbers"}),
    "order of labels": (lambda b, h, q, k: DOC[q] >= DOC[k], {"doc": "numbers"}),
    "labels against a number": (lambda b, h, q, k: (DOC[q] == 1) & (q >= k), {"doc": "numbers"}),
    "labels both ways": (
        lambda b, h, q, k: (DOC[q] == DOC[k]) | (DOC[q] > k),
        {"doc": "ids"},
    ),
    "two tensors": (
        lambda b, h, q, k: ~(TIMES[q] < DOC[k]) | (q - k < 2),
        {"doc": "numbers", "times": "numbers"},
    ),
}


def test_a_constant_beside_a_captured_tensor_is_rounded_as_torch_does() -> None:
    spec, short = from_mask_mod(lambda b, h, q, k: TENTHS[k] <= 0.3), TENTHS[:2]
    assert "tenths(k) <= 0.30000001192092896" in spec.source
    assert "<= 0.30000001192092896" in from_mask_mod(lambda b, h, q, k: short[k] <= 0.3).source


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_captured_tensors_are_compared(name: str) -> None:
    mask_mod, kinds = NUMBERS[name]
    spec, n = from_mask_mod(mask_mod), len(TIMES)
    assert {key: entry.kind for key, entry in spec.inputs.items()} == kinds
    values = {"times": TIMES.numpy(), "doc": DOC[:n].numpy()}
    meant = create_mask(mask_mod, 1, 1, n, n, device="cpu")[0, 0].numpy()
    assert (spec.mask(n, inputs={key: values[key] for key in kinds}) == meant).all()


def test_numbers_by_conditions_are_pushed_out_of_comparisons() -> None:
    spec = from_mask_mod(block_diffusion)
    meant = create_mask(block_diffusion, 1, 1, 32, 32, device="cpu")[0, 0].numpy()
    assert (spec.mask(32) == meant).all()


def test_the_masks_of_transformers_are_specs() -> None:
    from transformers import masking_utils as hf

    for mask_mod, text in (
        (hf.causal_mask_function, "attend causal"),
        (hf.sliding_window_causal_mask_function(5), "attend window(before = 4, after = 0)"),
        (hf.sliding_window_bidirectional_mask_function(5), "attend window(radius = 5)"),
        (hf.bidirectional_mask_function, "attend full"),
        (
            hf.packed_sequence_mask_function(DOC[None]),
            "input packed_sequence_mask: ids attend same",
        ),
    ):
        assert text in " ".join(from_mask_mod(mask_mod).source.split())


def test_heads_are_as_many_as_is_said() -> None:
    assert from_mask_mod(widths, heads=2).heads == 2
    assert from_mask_mod(causal, heads=5).heads == 5
    with pytest.raises(AttnSpecError, match="no mask at n = 1"):
        from_mask_mod(widths, heads=4)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "branch": (lambda b, h, q, k: k < q if q > 3 else k == q, "decides by the value"),
    "python and": (lambda b, h, q, k: q >= k and k > 2, "write conditions with `&`"),
    "mask": (lambda b, h, q, k: DIAGONAL[q, k], "attnspec.explain_mask"),
    "small types": (lambda b, h, q, k: DOC.to(torch.uint8)[q] - 1 >= k, "torch.uint8, which"),
    "rounded sums": (lambda b, h, q, k: TIMES[q] - TIMES[k] < 1, "torch.float32, which rounds"),
    "towards zero": (
        lambda b, h, q, k: torch.div(q - k, 4, rounding_mode="trunc") == 0,
        "divides towards zero what may be negative; use `//`",
    ),
    "a mark of a sample": (lambda b, h, q, k: (WIDTHS > 1)[b] & (q >= k), "for a mark of a sample"),
    "any of a tensor": (lambda b, h, q, k: (k == WIDTHS).any(), "torch.isin"),
    "any of an input": (
        lambda b, h, q, k: torch.isin(DOC[q], DOC[k]),
        "torch.isin takes a captured",
    ),
    "powers": (
        lambda b, h, q, k: 2 ** (q - k).abs() < 9,
        "`mask` is no spec: `where` has no value",
    ),
    "sample": (lambda b, h, q, k: q - k <= b, "number of the sample"),
    "score": (lambda b, h, q, k: q - k, "one boolean for a pair"),
    "row": (lambda b, h, q, k: (ids[0][b] > 1)[q], "`torch.gt` of a row"),
    "list": (lambda b, h, q, k: TOGETHER[b][q] == 1, "the index of a list"),
    "whole tensor": (lambda b, h, q, k: (DOC == q).any(), "as a whole"),
    "moved index": (lambda b, h, q, k: DOC[q // 2] == DOC[k // 2], "something else than"),
    "table of labels": (lambda b, h, q, k: k - WIDTHS[DOC[k]] < 4, "`starts[document]` for"),
    "bits": (lambda b, h, q, k: (q & k) == 0, "bit by bit"),
    "tables of two lengths": (
        lambda b, h, q, k: (q - k < WIDTHS[h]) & (k - q < WIDTHS[:2][h]),
        "tables of 3 and of 2 heads",
    ),
    "rounds": (lambda b, h, q, k: (q * 0.29).floor() == (k * 0.29).floor(), "rounds or wraps"),
    "thirds": (lambda b, h, q, k: q / 3 == k / 3, "torch.float32, which rounds"),
    "bytes": (lambda b, h, q, k: q.to(torch.int8) >= k.to(torch.int8), "torch.int8, which"),
    "halves": (lambda b, h, q, k: q.half() >= k, "torch.float16, which"),
    "large products": (lambda b, h, q, k: q.int() * 40_000 >= k, "torch.int32, which"),
    "squares of reals": (lambda b, h, q, k: q.float() ** 2 > k, "torch.float32, which"),
    "added": (lambda b, h, q, k: torch.where(q >= k, 0.0, -torch.inf), "return `… == 0`"),
    "function of scores": (lambda s, b, h, q, k: s + q - k, "takes five arguments"),
    "sine": (lambda b, h, q, k: torch.sin(q) > 0, "torch.sin"),
    "error of its own": (lambda b, h, q, k: q.nothing, "cannot be traced: AttributeError"),
    "wrong arity": (lambda q, k: q >= k, "takes 2 arguments; a mask takes (b, h, q, k)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_spec_says_is_refused_with_the_reason(name: str) -> None:
    mask_mod, reason = REFUSED[name]
    with pytest.raises(AttnSpecError, match=re.escape(reason)):
        from_mask_mod(mask_mod)


def test_tensors_whose_names_are_words_of_the_language_have_names_of_their_own() -> None:
    full, causal = DOC, MARKED
    found = from_mask_mod(lambda b, h, q, k: (full[q] == full[k]) | causal[k])
    said = {entry.name: entry.kind for entry in found.program.inputs}
    assert said == {"document": "ids", "marked": "tokens"}


class Slots:
    __slots__ = ("segments",)
    turn = DOC.clone()

    def __init__(self) -> None:
        self.segments = DOC


SLOTS = Slots()
CAPTURED: dict[str, tuple[Callable[..., Any], str]] = {
    "a row of a list": (lambda b, h, q, k: ids[0][b][q] == ids[0][b, k], "ids: ids"),
    "the second of a tuple": (
        lambda b, h, q, k: parts["by"][1][q] == parts["by"][1][k],
        "by_1: ids",
    ),
    "several": (
        lambda b, h, q, k: (
            (TOGETHER[0][q] == TOGETHER[0].int()[k])
            | (TOGETHER[2][q] == TOGETHER[2][k])
            | TOGETHER[1][k]
        ),
        "together: ids together_1: tokens together_2: ids",
    ),
    "alike": (
        lambda b, h, q, k: (DOC[q] == DOC[k]) & ((DOC + 1)[q] == (DOC + 1)[k]),
        "doc: ids doc_1: ids",
    ),
    "a slot": (lambda b, h, q, k, x=SLOTS: x.segments[q] == x.segments[k], "segments: ids"),
    "of a class": (lambda b, h, q, k, x=SLOTS: x.turn[q] == Slots.turn[k], "turn: ids"),
    "unnamed": (lambda b, h, q, k: (torch.arange(17) // 3 == 1)[k], "marked: tokens"),
    "unnamed lengths": (lambda b, h, q, k: torch.tensor([3, 5])[b] > k, "lengths: length"),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_a_captured_tensor_is_one_input_called_as_it_is_reached(name: str) -> None:
    mask_mod, inputs = CAPTURED[name]
    spec = from_mask_mod(mask_mod)
    said = sorted(f"{each.name}: {each.kind}" for each in spec.program.inputs)
    assert " ".join(said) == inputs


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a function of .* attnspec.explain_mask looks for"):
        from_mask_mod(np.ones((3, 3), bool))  # type: ignore[arg-type]


def test_a_function_with_a_memory_is_noticed() -> None:
    calls: list[None] = []

    def moody(b: Any, h: Any, q: Any, k: Any) -> Any:
        calls.append(None)
        return q >= k if len(calls) == 1 else q > k

    with pytest.raises(AttnSpecError, match="something else than its arguments"):
        from_mask_mod(moody)


def test_whole_numbers_of_a_predicate_are_those_that_stand_in_it() -> None:
    assert constants(3.5) == {4}
    assert constants(-7) == {7}
    assert constants(Apply("+", (2, -3.0))) == {2, 3}
    assert constants(float("inf")) == constants(True) == set()
