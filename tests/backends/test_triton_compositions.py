"""Random compositions in Triton kernels, under the interpreter, with all that a call may bring:
values, log-sum-exps and gradients are those of the definition."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attention_checks import tensors
from interpreted import interpreted
from listed_calls import CPU, assert_partials_agree
from random_specs import reading_text, spec_text

from attnspec.backends.triton import tables, tuning
from attnspec.backends.triton.backend import TritonBackend
from attnspec.backends.triton.tuning import ON_GPU
from attnspec.lower.lower import stand_ins, works_of
from attnspec.lower.work import Alibi, Bias, Call, Change, Softcap, Work
from attnspec.spec import parse

__all__ = ["interpreted"]

pytestmark = pytest.mark.usefixtures("interpreted")

CHANGES: tuple[tuple[Change, ...], ...] = (
    (),
    (),
    (Softcap(2.0),),
    (Alibi((0.25, 0.0625, -0.1, 0.004)),),
    (Bias(6, 9, True, "table"),),
    (Bias(4, 12, False, "table"), Softcap(1.5)),
)


def works(seed: int, source: random.Random) -> list[Work]:
    """The different works of a random spec, of odd sizes, with random changes of scores."""
    n = source.choice((1, 2, 15, 16, 17, 31, 41, 50))
    n_q = source.choice((n, n, max(1, n - 17), 1))
    text = (spec_text, reading_text)[seed % 2](seed)
    program = parse(text).program
    found = works_of(program, 0, program.heads or 1, n_q, n, stand_ins(program))
    changes = source.choice(CHANGES)
    normalize = source.choice(("softmax", "softmax1"))
    return [replace(work, changes=changes, normalize=normalize) for work, _ in found]


def call_for(work: Work, heads: int, source: random.Random) -> Call:
    """Padding, dropped weights, learned tables and inputs; the first sample may be all padding."""
    n = work.n_k
    padding = None
    if source.random() < 0.5:
        padding = torch.rand(2, n) < 0.7
        padding[0] &= source.random() < 0.7
    data = {
        "t": torch.rand(2, n, dtype=torch.float64).sort(1).values,
        "i": torch.randint(0, 4, (2, n)).sort(1).values,
        "m": torch.rand(2, n) < 0.2,
        "s": torch.randint(0, n + 1, (2, 1, 1)),
    }
    learned = {
        x.table: torch.randn(heads, x.buckets).requires_grad_()
        for x in work.changes
        if isinstance(x, Bias)
    }
    dropped = source.random() < 0.3
    seed = torch.tensor([source.randrange(1 << 40)]) if dropped else None
    read = {name: data[name] for name in work.reads}
    return Call(padding, 0.3 * dropped, tables=learned, data=read, seed=seed)


def check(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(seed)
    torch.manual_seed(seed)
    monkeypatch.setattr(tuning, "ON_GPU", replace(ON_GPU, targets=(source.choice((16, 32)),)))
    monkeypatch.setattr(tables, "SHORTEST", source.choice((1, 16)))
    for work in works(seed, source):
        heads = source.choice((1, 2, 4))
        shared = source.choice([x for x in (1, 2, 4) if heads % x == 0])
        call, members = call_for(work, heads, source), tuple(range(heads))
        given = tensors(
            2,
            heads,
            work.n_q,
            work.n_k,
            key_heads=heads // shared,
            size=source.choice((3, 8, 17)),
            out_size=source.choice((1, 5, 16)),
            dtype=torch.float32,
        )
        kernel = TritonBackend().build(work, members, CPU)
        assert_partials_agree(kernel, work, members, given, call)


@pytest.mark.parametrize("seed", range(6))
def test_a_few_compositions(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(seed, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_two_hundred_compositions(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100 + 20 * part, 120 + 20 * part):
        check(seed, monkeypatch)
