"""Mask functions of torch as specs: what is written of them, the pairs, and what is refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask, or_masks
from transformers import masking_utils as hf

from attnspec import AttnSpecError, Spec, from_mask_mod

MaskMod: TypeAlias = "Callable[[Any, Any, Any, Any], Any]"
DOC = torch.tensor([0, 0, 0, 3, 3, 1, 1, 1, 1, 4, 4, 4, 4, 4, 2, 2, 2])
MARKED = torch.arange(17) % 5 == 2
STEPS, DOUBLED = torch.tensor([4, 8, 12]), torch.tensor([2, 4, 8])
WIDTHS, EVEN = torch.tensor([1, 2, 8]), torch.tensor([True, False, True])
TENTHS = torch.tensor([0.1, 0.2, 0.3, 0.4])
TIMES = torch.tensor([0.5, 0.25, 3.0, 3.0, -1.0, 7.5, 0.25] * 3)[:17]
LENGTHS = torch.tensor([5, 0, 30])
ids = [torch.stack([DOC, DOC.flip(0)])]
parts = {"by": (MARKED, DOC.clone())}
TOGETHER: Any = (DOC.clone(), MARKED, DOC.flip(0))
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
DIAGONAL = torch.eye(17, dtype=torch.bool)


class Captured:
    __slots__ = ("ends", "segments", "seq_lens")
    turn = DOC.clone()

    def __init__(self) -> None:
        self.seq_lens, self.segments = LENGTHS, DOC
        self.ends = (torch.arange(17) // 6 + 1) * 6

    def prefix(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) | (k < self.seq_lens[b])

    def chunks(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < self.ends[q]) & (k >= self.ends[q] - 8)


HELD = Captured()
VALUES = {
    **dict.fromkeys(("doc", "ids", "by_1", "segments", "turn", "packed_sequence_mask"), DOC),
    **{"marked": MARKED, "times": TIMES, "doc_1": DOC + 1, "ends": HELD.ends},
    **{"together": DOC, "together_1": MARKED, "together_2": DOC.flip(0)},
    **dict.fromkeys(("lengths", "seq_lens"), LENGTHS),
}
"""What each input is of, or one number for each sample."""


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


WRITTEN: dict[str, str] = {
    "k * 1 <= q // 1": "attend causal",
    "k + 0 <= q - 0": "attend causal",
    "(k % 7 == 3) & (q % 5 == 1)": "attend where(k % 7 == 3 and q % 5 == 1)",
    "torch.ones_like(q, dtype=torch.bool)": "attend full",
    "q.new_ones((), dtype=torch.bool) & (k <= q)": "attend causal",
    "(q >= k) & (q - k <= 256)": "attend window(before = 256, after = 0)",
    "(q >= k) & (k > q - 7)": "attend window(before = 6, after = 0)",
    "(q % 3 == 0) & ((q - k).abs() <= 3)": "attend where(q % 3 == 0) & window(radius = 3)",
    "(q >= k) | (k < 7)": "attend causal | columns(first(7))",
    "(q // 64 == k // 64) & (q >= k)": "causal attend block(size = 64)",
    "q >> 3 == k >> 3": "attend block(size = 8)",
    "((q - k).abs() <= 9) & ((q - k).abs() % 3 == 0)": "attend dilated(radius = 9, step = 3)",
    "(q - k) % 5 == 0": "attend residue(step = 5)",
    "(DOC[q] == DOC[k]) & (q >= k)": "input doc: ids causal attend same(doc)",
    "(DOC[q] == DOC[k]) & (q >= k) & (q - k < 4)": (
        "input doc: ids causal attend same(doc) & window(before = 3, after = 0)"
    ),
    "(q >= k) & ((q - k < 32) | (k < 4) | (k % 16 == 0))": (
        "causal attend window(before = 31, after = 0) | columns(first(4)) | columns(every(16))"
    ),
    "(q >= k) & ((q - k <= 4) | MARKED[k])": (
        "input marked: tokens causal attend window(before = 4, after = 0) | columns(marked)"
    ),
    "near(b, h, q, k) | MARKED[q] | MARKED[k]": (
        "input marked: tokens attend window(radius = 3) | global(marked)"
    ),
    "MARKED[q] | MARKED[k]": "input marked: tokens attend global(marked)",
    "(q.clamp(2, 14) - k).abs() <= 2": "attend where(abs(min(max(q, 2), 14) - k) <= 2)",
    "k <= torch.where(q < 8, 7, q)": (
        "attend rows(first(8)) & columns(first(8)) | where(q >= 8) & causal"
    ),
    "(q >= k) & (q - k < 2)": "attend window(before = 1, after = 0)",
    "(q + k) / 2 <= 5.5": "attend where((q + k) / 2 <= 5.5)",
    "(q.double() * 0.29).floor() == (k.double() * 0.29).floor()": (
        "attend where(floor(q * 0.29) == floor(k * 0.29))"
    ),
    "q - k < 2 ** h": "attend where(q - k < 2 ** head)",
    "torch.minimum(q, k) < 2": "attend where(min(q, k) < 2)",
    "~(q == k)": "attend where(q != k)",
    "DOC[None][0, q] == DOC[None][0, k]": "input doc: ids attend same(doc)",
    "DOC[q.clamp(0, 16)] == DOC[torch.where(k < 17, k, 16)]": "input doc: ids attend same(doc)",
    "torch.where((q >= 6) == 1, (q - 6) // 4, q // 4) == k // 4": (
        "attend where(q >= 6 and (q - 6) // 4 == k // 4) | rows(first(6)) & block(size = 4)"
    ),
    "(q >= 6) == (k >= 6)": "attend where(q >= 6 and k >= 6) | rows(first(6)) & columns(first(6))",
    "q // 4 % 1 == k // 4 % 1": "attend full",
    "(MARKED[q] == 1) | (MARKED[k].int() == 1)": "input marked: tokens attend global(marked)",
    "q - k < torch.where(MARKED[k], 5, 2)": (
        "input marked: tokens attend columns(marked) & where(q - k < 5) | ~columns(marked)"
        " & where(q - k < 2)"
    ),
    "torch.div(q, 4, rounding_mode='trunc') == torch.fmod(k, 4)": "attend where(q // 4 == k % 4)",
    "torch.isin(k, WIDTHS) | ~torch.isin(q - k, WIDTHS)": (
        "attend where(k in {1, 2, 8} or not q - k in {1, 2, 8})"
    ),
    "torch.bucketize(q, WIDTHS[1:], right=True) > (k > 5).int()": (
        "attend where(q in 2..7) & columns(first(6)) | where(q >= 8)"
    ),
    "torch.bucketize(q, STEPS, right=True) == torch.searchsorted(STEPS, k)": (
        "attend where(min(q // 4, 3) == min(max((k - 1) // 4, 0), 3))"
    ),
    "torch.bucketize(q, DOUBLED) == torch.bucketize(k, DOUBLED)": (
        "attend rows(first(3)) & columns(first(3)) | where(q in 3..4 and k in 3..4) |"
        " where(q in 5..8 and k in 5..8) | where(q >= 9 and k >= 9)"
    ),
    "torch.bucketize(q - k, DOUBLED) == torch.where(q < 4, 2, 1)": (
        "attend where(q - k in 3..4 and q >= 4) | where(q - k in 5..8) & rows(first(4))"
    ),
    "(q - k).abs() <= h": "attend where(abs(q - k) <= head)",
    "(q >= k) & (k < LENGTHS[b]) & (q < LENGTHS[b])": (
        "input lengths: length causal attend prefix(lengths) & transpose(prefix(lengths))"
    ),
    "LENGTHS.int()[b] <= k": "input lengths: length attend ~prefix(lengths)",
    "(k - LENGTHS[None].T[b, 0]) % 4 == 0": (
        "input lengths: length attend where((k - lengths) % 4 == 0)"
    ),
    "TIMES[k] <= TIMES[q]": "input times: numbers attend where(times(k) <= times(q))",
    "DOC[q] >= DOC[k]": "input doc: numbers attend where(doc(q) >= doc(k))",
    "(DOC[q] == 1) & (q >= k)": "input doc: numbers causal attend where(doc(q) == 1)",
    "(DOC[q] == DOC[k]) | (DOC[q] > k)": "input doc: ids attend same(doc) | where(doc(q) > k)",
    "~(TIMES[q] < DOC[k]) | (q - k < 2)": (
        "input doc: numbers input times: numbers attend ~where(times(q) < doc(k)) | where(q"
        " - k < 2)"
    ),
    "ids[0][0][q] == ids[0][0, k]": "input ids: ids attend same(ids)",
    "parts['by'][1][q] == parts['by'][1][k]": "input by_1: ids attend same(by_1)",
    "(TOGETHER[0][q] == TOGETHER[0].int()[k])"
    " | (TOGETHER[2][q] == TOGETHER[2][k]) | TOGETHER[1][k]": (
        "input together: ids input together_2: ids input together_1: tokens attend"
        " same(together) | same(together_2) | columns(together_1)"
    ),
    "(DOC[q] == DOC[k]) & ((DOC + 1)[q] == (DOC + 1)[k])": (
        "input doc: ids input doc_1: ids attend same(doc) & same(doc_1)"
    ),
    "HELD.segments[q] == HELD.segments[k]": "input segments: ids attend same(segments)",
    "HELD.turn[q] == Captured.turn[k]": "input turn: ids attend same(turn)",
    "(torch.arange(17) % 5 == 2)[k]": "input marked: tokens attend columns(marked)",
    "torch.tensor([5, 0, 30])[b] > k": "input lengths: length attend prefix(lengths)",
    "(k < 3) | (q < 3)": "attend global(first(3))",
    "(q // 6 == k // 6) | (k % 6 >= 3)": "attend fixed(stride = 6, cells = 3)",
    "(q >= k) & (((q - k).abs() <= 2) | (k < 3))": (
        "causal attend window(radius = 2) | columns(first(3))"
    ),
    "(k < 0) | (q < 0)": "attend where(false)",
    "torch.where(q > 3, q, 0 - k) < 0": "attend rows(first(4)) & where(0 - k < 0)",
}
"""What mask functions of (b, h, q, k) give, and what is written of them."""

FUNCTIONS: list[tuple[Callable[..., Any], str]] = [
    (causal, "attend causal"),
    (near, "attend window(radius = 3)"),
    (and_masks(causal, near), "attend window(before = 3, after = 0)"),
    (or_masks(causal, near), "attend causal | window(radius = 3)"),
    (in_place, "attend window(before = 3, after = 0)"),
    (HELD.prefix, "input seq_lens: length attend causal | prefix(seq_lens)"),
    (HELD.chunks, "input ends: numbers attend where(k < ends(q)) & where(k >= ends(q) - 8)"),
    (hf.causal_mask_function, "attend causal"),
    (hf.sliding_window_causal_mask_function(5), "attend window(before = 4, after = 0)"),
    (hf.sliding_window_bidirectional_mask_function(5), "attend window(radius = 5)"),
    (
        hf.packed_sequence_mask_function(DOC[None].expand(3, -1)),
        "input packed_sequence_mask: ids attend same(packed_sequence_mask)",
    ),
]


def function(text: str) -> MaskMod:
    found: MaskMod = eval(f"lambda b, h, q, k: {text}", globals())
    return found


@pytest.mark.parametrize(
    ("mask_mod", "text"), [*((function(x), y) for x, y in WRITTEN.items()), *FUNCTIONS]
)
def test_a_function_is_written_so_and_has_its_pairs(mask_mod: MaskMod, text: str) -> None:
    spec = from_mask_mod(mask_mod, name="found")
    assert " ".join(spec.source.split()) == f"attention found {{ {text} }}"
    require_pairs(spec, mask_mod, 17)
    if not spec.inputs:
        require_pairs(spec, mask_mod, 1)


def require_pairs(spec: Spec, mask_mod: MaskMod, n: int) -> None:
    """The pairs are those that torch computes, of each sample and head."""
    meant = create_mask(lambda b, h, q, k: mask_mod(b, h, q, k), 3, 3, n, n, device="cpu").numpy()
    for sample in range(3 if "length" in {x.kind for x in spec.inputs.values()} else 1):
        inputs: dict[str, Any] = {x: VALUES[x].numpy() for x in spec.inputs}
        inputs = {x: y[sample] if len(y) == 3 else y[:n] for x, y in inputs.items()}
        for head in range(3):
            held = spec.mask(n, head=head, inputs=inputs)
            assert (held == meant[sample, head]).all()


@pytest.mark.parametrize("before", range(3))
@pytest.mark.parametrize("after", range(3))
def test_a_band_is_called_a_window_whatever_its_sides(before: int, after: int) -> None:
    own = "self" if before == 0 else f"window(radius = {before})"
    wanted = own if before == after else f"window(before = {before}, after = {after})"
    spec = from_mask_mod(lambda b, h, q, k: (q < k + before + 1) & (k < q + after + 1))
    assert f"attend {wanted}\n" in spec.source


def test_heads_are_as_many_as_a_table_has_or_is_said() -> None:
    spec = from_mask_mod(widths)
    assert spec.heads == 3
    require_pairs(spec, widths, 17)
    assert from_mask_mod(widths, heads=2).heads == 2
    assert from_mask_mod(causal, heads=5).heads == 5
    with pytest.raises(AttnSpecError, match="no mask at n = 1"):
        from_mask_mod(widths, heads=4)


def test_numbers_by_conditions_are_pushed_out_of_comparisons() -> None:
    spec = from_mask_mod(block_diffusion)
    meant = create_mask(block_diffusion, 1, 1, 32, 32, device="cpu")[0, 0].numpy()
    assert (spec.mask(32) == meant).all()


def test_samples_of_a_batch_share_a_spec() -> None:
    both = torch.stack([DOC, DOC.flip(0)])
    spec = from_mask_mod(lambda b, h, q, k: both[b, q] == both[b, k])
    assert {name: entry.kind for name, entry in spec.inputs.items()} == {"both": "ids"}


def test_names_that_are_words_of_the_language_are_replaced() -> None:
    full, causal = DOC, MARKED
    spec = from_mask_mod(lambda b, h, q, k: (full[q] == full[k]) | causal[k])
    kinds = {name: entry.kind for name, entry in spec.inputs.items()}
    assert kinds == {"document": "ids", "marked": "tokens"}


def test_a_constant_beside_a_captured_tensor_is_rounded_as_torch_does() -> None:
    for tenths in (TENTHS, TENTHS[:2]):
        spec = from_mask_mod(lambda b, h, q, k, tenths=tenths: tenths[k] <= 0.3)
        assert "<= 0.30000001192092896" in spec.source


REFUSED: dict[str, str] = {
    "k < q if q > 3 else k == q": "decides by the value",
    "q >= k and k > 2": "write conditions with `&`",
    "DIAGONAL[q, k]": "attnspec.explain_mask",
    "DOC.to(torch.uint8)[q] - 1 >= k": "torch.uint8, which",
    "TIMES[q] - TIMES[k] < 1": "torch.float32, which rounds",
    "torch.div(q - k, 4, rounding_mode='trunc') == 0": (
        "divides towards zero what may be negative; use `//`"
    ),
    "(WIDTHS > 1)[b] & (q >= k)": "for a mark of a sample",
    "(k == WIDTHS).any()": "torch.isin",
    "torch.isin(DOC[q], DOC[k])": "torch.isin takes a captured",
    "2 ** (q - k).abs() < 9": "`mask` is not a spec: `where` has no value",
    "q - k <= b": "number of the sample",
    "q - k": "one boolean for a pair",
    "(ids[0][b] > 1)[q]": "`torch.gt` of a row",
    "TOGETHER[b][q] == 1": "the index of a list",
    "(DOC == q).any()": "as a whole",
    "DOC[q // 2] == DOC[k // 2]": "something else than",
    "k - WIDTHS[DOC[k]] < 4": "`starts[document]` for",
    "q & k == 0": "bit by bit",
    "(q - k < WIDTHS[h]) & (k - q < WIDTHS[:2][h])": "tables of 3 and of 2 heads",
    "((q - k) / 2).int() >= 0": "cuts a real number off",
    "((q >= k) // (q > 2)).bool()": "as with numbers",
    "q.new_ones((3,)).any()": "a tensor [3] for a pair",
    "(q * 0.29).floor() == (k * 0.29).floor()": "rounds or wraps",
    "q / 3 == k / 3": "torch.float32, which rounds",
    "q.to(torch.int8) >= k.to(torch.int8)": "torch.int8, which",
    "q.half() >= k": "torch.float16, which",
    "q.int() * 40000 >= k": "torch.int32, which",
    "q.float() ** 2 > k": "torch.float32, which",
    "torch.where(q >= k, 0.0, -torch.inf)": "return `… == 0`",
    "torch.sin(q) > 0": "torch.sin",
    "q.nothing": "cannot be traced: AttributeError",
}

CALLED: list[tuple[Callable[..., Any], str]] = [
    (lambda s, b, h, q, k: s + q - k, "takes five arguments"),
    (lambda q, k: q >= k, "takes 2 arguments; a mask takes (b, h, q, k)"),
]


@pytest.mark.parametrize(
    ("mask_mod", "reason"), [*((function(x), y) for x, y in REFUSED.items()), *CALLED]
)
def test_what_no_spec_says_is_refused_with_the_reason(mask_mod: MaskMod, reason: str) -> None:
    with pytest.raises(AttnSpecError, match=re.escape(reason)):
        from_mask_mod(mask_mod)


def test_what_is_no_function_of_its_arguments_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a function of .* attnspec.explain_mask looks for"):
        from_mask_mod(np.ones((3, 3), bool))  # type: ignore[arg-type]
    calls: list[None] = []

    def moody(b: Any, h: Any, q: Any, k: Any) -> Any:
        calls.append(None)
        return q >= k if len(calls) == 1 else q > k

    with pytest.raises(AttnSpecError, match="something else than its arguments"):
        from_mask_mod(moody)


ROUNDING = {
    "q.int() * 32768 >= k": "q.int() * 32767 >= k",
    "q.float() * 257 >= k": "q.float() * 256 >= k",
    "q.float() / 512 >= k": "q.float() / 256 >= k",
    "q.float() / 3 >= k": "q.float() / 256 >= k",
    "q.float() * 1e-05 >= k": "q.float() * 0.0625 >= k",
    "q / 4 * 1024 >= k": "(q / 4).floor() * 1024 >= k",
    "q / 8 * (k / 64) >= k": "q / 2 + k / 64 >= 3",
    "q.double() ** 4 >= k": "q.double() ** 3 >= k",
    "q / 3 >= k": "q.double() / 3 >= k",
    "q.half() >= k.half()": "q.float() >= k.float()",
    "q.int() * 2 ** 40 >= k": "q * 2 ** 40 >= k",
}
"""Numbers of short types that round or wrap, and others that are exact at every length that is
checked."""


@pytest.mark.parametrize("exact", [True, False])
def test_numbers_of_short_types_are_recorded_where_they_are_exact(exact: bool) -> None:
    for rounds, right in ROUNDING.items():
        if exact:
            from_mask_mod(function(right))
            continue
        with pytest.raises(AttnSpecError, match="rounds or wraps"):
            from_mask_mod(function(rounds))


# --- random functions -----------------------------------------------------------------------------


NUMBERS = """x + y; x - y; x + c; c - x; torch.add(x, y, alpha=c); x * c; x // c; x % c; x >> 1; -x
x.abs(); torch.div(x, c, rounding_mode="floor"); torch.minimum(x, y); torch.maximum(x, y)
x.clamp(-1, c); x.clamp_max(c); x.clamp(min=1 - c); torch.where(r, x, y); torch.where(r, x, c)
r.to(torch.int64) * c; x * r; r + x; torch.where(r, x == c, y); x.new_ones(()) * c + x"""
COMPARED = """q >= k; x <= y; x < c; x >= c; x > y; x == y; x % (c + 1) == 0; x != c; EVEN[h]
x.to(torch.bool); x.abs() % (c + 1) == 0; q >= 0; h < 0"""
JOINED = """a & z; a | z; a ^ z; ~a; a == z; a != z; torch.logical_and(a, z); a & True
torch.where(r, a, z); torch.logical_not(a) | z; a * z; a + z; a < z; a <= z; a > z; a >= z
torch.maximum(a, z); torch.minimum(a, z); a | torch.zeros_like(z)
a ^ torch.ones_like(q, dtype=torch.bool)"""
INPUTS = "DOC[q] == DOC[k]; DOC[q] != DOC[k]; MARKED[q]; MARKED[k]; MARKED[q] | MARKED[k]"
ENDS = "q; k; q - k; h; WIDTHS[h]"


def drawn(draw: random.Random, kind: str, depth: int) -> str:
    """A random text: a number, a condition r of numbers alone, or one a or z of inputs, too."""
    if kind in "xy":
        forms = ENDS if depth <= 0 or draw.random() < 0.2 else NUMBERS
    elif kind in "az" and draw.random() < 0.2:
        forms = INPUTS
    else:
        forms = COMPARED if depth <= 0 or draw.random() < 0.3 else JOINED
    form = draw.choice(re.split("[;\n] *", forms))
    if kind == "r":
        form = re.sub(r"\b[az]\b", "r", form)

    def part(name: re.Match[str]) -> str:
        inner = str(draw.randint(1, 4)) if name[0] == "c" else drawn(draw, name[0], depth - 1)
        return f"({inner})"

    return re.sub(r"\b[xyrazc]\b", part, form)


SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 200)]


@pytest.mark.parametrize("seed", [*range(12), *SLOW])
def test_a_random_function_has_the_pairs_that_torch_computes(seed: int) -> None:
    mask_mod = function(drawn(random.Random(seed), "a", 3))
    require_pairs(from_mask_mod(mask_mod, heads=3), mask_mod, 9)
