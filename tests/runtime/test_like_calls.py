"""Calls like an earlier one: what of the package they enter, and that they are as strict."""

from __future__ import annotations

import os
import sys
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import tensors
from population import spec_of
from torch import Tensor

import attnspec

WINDOW, LSH = "causal attend window(radius = 64)", "attend lsh(buckets = 16, rounds = 2)"
ROOMS = [os.path.realpath(path) for path in attnspec.__path__]
ROOMS.append(os.path.realpath(os.path.join(ROOMS[0], "backends")))


def entered(module: Any, *parts: Tensor) -> Counter[str]:
    """How many Python functions of each file a call enters that is like two before it."""
    counts: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            counts[frame.f_code.co_filename] += 1

    with torch.no_grad():
        for _ in range(2):
            module(*parts)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            module(*parts)
        finally:
            sys.setprofile(before)
    return counts


def in_words(counts: Counter[str]) -> str:
    short = ", ".join(f"{'/'.join(x.split('/')[-2:])} {n}" for x, n in counts.most_common())
    return f"{counts.total()} calls in {len(counts)} files: {short}"


def test_a_window_enters_each_of_few_files() -> None:
    """One after the other: the module, the engine, the kernel and its blocks."""
    q, k, v = (x.detach().float() for x in tensors(2, 4, 1024, 1024, size=32))
    counts = entered(spec_of(WINDOW).compile(), q, k, v)
    print(in_words(counts))
    assert counts.total() <= 60, in_words(counts)
    assert len(counts) <= 8, in_words(counts)


def test_choices_enter_few_files_of_the_package() -> None:
    """Torch, numpy and the standard library are not counted: what decides calls much of them."""
    q, _, v = (x.detach().float() for x in tensors(2, 4, 1024, 1024, size=32))
    counts = entered(spec_of(LSH).compile(), q, q, v)
    own = Counter({x: n for x, n in counts.items() if os.path.realpath(x).startswith(tuple(ROOMS))})
    print(in_words(own), in_words(counts), sep="\n")
    assert len(own) <= 15, in_words(own)


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer": True},
        {"layer": 1.0},
        {"layer": torch.tensor(1.0)},
        {"layer": [1]},
        {"layer": 2},
        {"query_start": False + 1},
        {"query_start": 0.0},
        {"q": None},
        {"q": np.zeros((2, 4, 40, 8), np.float32)},
        {"q": torch.zeros(2, 4, 40, 8).to_sparse()},
        {"q": torch.zeros(2, 4, 40, 8, dtype=torch.float64)},
        {"k": torch.zeros(2, 4, 40, 8, device="meta")},
        {"k": torch.zeros(2, 4, 40, 8).transpose(1, 2)},
        {"v": torch.nested.nested_tensor([torch.zeros(40, 8)] * 2, layout=torch.jagged)},
        {"v": torch.zeros(2, 4, 41, 8)},
        {"key_padding_mask": torch.ones(2, 41, dtype=torch.bool)},
        {"dropout_p": 2},
        {"inputs": {"x": torch.ones(2, 40)}},
    ],
    ids=str,
)
def test_a_later_call_refuses_as_the_first(wrong: dict[str, Any]) -> None:
    spec = spec_of("layers 2 causal attend window(radius = 5)")
    fits = dict(zip("qkv", torch.randn(3, 2, 4, 40, 8), strict=True))
    first, later = spec.compile(), spec.compile()
    for layer in (0, 1):
        later(**fits, layer=layer)
    said = []
    for module in (first, later):
        with pytest.raises((TypeError, ValueError)) as refused:
            module(**{**fits, **wrong})
        said.append((refused.type, str(refused.value)))
    assert said[0] == said[1]


def test_a_layer_that_is_a_tensor_is_read_in_each_call() -> None:
    module = spec_of("layers 2 layer 0 { attend self } layer 1 { attend full }").compile()
    q, k, v = torch.randn(3, 1, 1, 6, 4)
    layer = torch.tensor(0)
    torch.testing.assert_close(module(q, k, v, layer=layer), v)
    layer.fill_(1)
    torch.testing.assert_close(module(q, k, v, layer=layer), torch.softmax(q @ k.mT / 2, -1) @ v)
