"""Mask functions of torch as specs: what is written of them, the pairs, and what is refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from goldens import Golden
from sweeps import few
from torch.nn.attention import flex_attention as flex
from transformers import masking_utils as hf  # noqa: F401, a name in the file of functions

from attnspec import AttnSpecError, Spec, from_mask_mod

MaskMod: TypeAlias = "Callable[[Any, Any, Any, Any], Any]"
DOC = torch.tensor([0, 0, 0, 3, 3, 1, 1, 1, 1, 4, 4, 4, 4, 4, 2, 2, 2])
START = torch.tensor([0, 0, 0, 3, 3, 5, 5, 5, 5, 9, 9, 9, 9, 9, 14, 14, 14])
PADDED, UNEQUAL = torch.arange(17) - 5, torch.tensor([0] * 3 + [1] * 5 + [2] * 9)
EVICTED = torch.arange(17) + 1 + torch.arange(17) * 5 % 12
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
BOTH, DIAGONAL = torch.stack([DOC, DOC.flip(0), DOC]), torch.eye(17, dtype=torch.bool)


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
    **{"marked": MARKED, "times": TIMES, "doc_1": DOC + 1, "ends": HELD.ends, "both": DOC},
    **{"start": START, "padded": PADDED, "evicted": EVICTED, "unequal": UNEQUAL},
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


def function(text: str) -> MaskMod:
    found: MaskMod = eval(f"lambda b, h, q, k: {text}", globals())
    return found


def test_functions_become_the_approved_specs_or_refusals(golden: Golden) -> None:
    """The text of each function in the file and its pairs, or why there is none."""

    def ask(text: str) -> tuple[str, str]:
        mask_mod = eval(text, globals())
        spec = from_mask_mod(mask_mod, name="mask")
        # tensors of the functions have 17 positions
        for n in (17,) if spec.inputs else (32, 1):
            require_pairs(spec, mask_mod, n)
        return "written", "\n".join(spec.source.splitlines()[1:-1])

    golden.calls(ask)


def require_pairs(spec: Spec, mask_mod: MaskMod, n: int) -> None:
    """The pairs are those that torch computes, of each sample and head."""
    meant = flex.create_mask(
        lambda b, h, q, k: mask_mod(b, h, q, k), 3, 3, n, n, device="cpu"
    ).numpy()
    for sample in range(3 if "length" in {x.kind for x in spec.inputs.values()} else 1):
        inputs: dict[str, Any] = {x: VALUES[x].numpy() for x in spec.inputs}
        inputs = {x: y[sample] if len(y) == 3 else y[:n] for x, y in inputs.items()}
        for head in range(3):
            held = spec.mask(n, head=head, inputs=inputs)
            assert (held == meant[sample, head]).all()


def test_heads_are_as_many_as_a_table_has_or_is_said() -> None:
    assert from_mask_mod(widths, heads=2).heads == 2
    assert from_mask_mod(causal, heads=5).heads == 5
    # a spec is called as its function, unless that is a word of the language
    assert [from_mask_mod(x).name for x in (widths, causal)] == ["widths", "mask"]
    with pytest.raises(AttnSpecError, match="no mask at n = 1"):
        from_mask_mod(widths, heads=4)


def test_numbers_by_conditions_are_pushed_out_of_comparisons() -> None:
    require_pairs(from_mask_mod(block_diffusion), block_diffusion, 32)


def test_names_that_are_words_of_the_language_are_replaced() -> None:
    full, causal = DOC, MARKED
    spec = from_mask_mod(lambda b, h, q, k: (full[q] == full[k]) | causal[k])
    kinds = {name: entry.kind for name, entry in spec.inputs.items()}
    assert kinds == {"document": "ids", "marked": "tokens"}


def test_a_constant_beside_a_captured_tensor_is_rounded_as_torch_does() -> None:
    for tenths in (TENTHS, TENTHS[:2]):
        spec = from_mask_mod(lambda b, h, q, k, tenths=tenths: tenths[k] <= 0.3)
        assert "<= 0.30000001192092896" in spec.source


def test_functions_of_anything_but_their_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"a function of .* tensor call `attnspec.explain_mask`"):
        from_mask_mod(np.ones((3, 3), bool))  # type: ignore[arg-type]
    with pytest.raises(AttnSpecError, match="cannot be traced: AttributeError"):
        from_mask_mod(lambda b, h, q, k: q.nothing)
    calls: list[None] = []

    def moody(b: Any, h: Any, q: Any, k: Any) -> Any:
        calls.append(None)
        return q >= k if len(calls) == 1 else q > k

    with pytest.raises(AttnSpecError, match="something besides its arguments"):
        from_mask_mod(moody)


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


@pytest.mark.parametrize("seed", few(range(200), range(6)))
def test_a_random_function_has_the_pairs_that_torch_computes(seed: int) -> None:
    mask_mod = function(drawn(random.Random(seed), "a", 3))
    require_pairs(from_mask_mod(mask_mod, heads=3), mask_mod, 9)
