"""Plain operations under torch.export with a dynamic n: files that stand alone, and those of this
process."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import attnspec
from attnspec.runtime import composed

SLOW = pytest.mark.slow
BODIES = (
    "attend window(radius = 3)",
    "input p: length causal attend full | prefix(p) score alibi()",
    "attend dilated(radius = 3, step = 2)",
    "attend residue(step = 4)",
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
    "causal attend window(before = 3, after = 0) score softcap(cap = 5)",
    "causal attend window(before = 3, after = 0) normalize softmax1",
    "causal attend window(before = 3, after = 0) normalize relu",
    "attend linear()",
    "attend fourier()",
    "input x: numbers attend where(x(k) + 1 < x(q))",
)


class Positional(nn.Module):
    """An attention whose inputs are positional."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, q: Any, k: Any, v: Any, inputs: Any) -> Any:
        return self.attention(q, k, v, inputs=inputs)


def inputs_of(body: str, n: int) -> dict[str, torch.Tensor]:
    at = torch.arange(n)[None]
    every = {"doc": at // 4, "p": torch.tensor([5]), "t": at % 7 == 0, "x": at * 2 % 9}
    return {name: x for name, x in every.items() if f"input {name}:" in body}


def exported(module: nn.Module, body: str, strict: bool) -> Any:
    n, inputs = torch.export.Dim("n", min=2, max=4096), inputs_of(body, 33)
    shapes: dict[str, Any] = {name: {2: n} for name in "qkv"}
    shapes["inputs"] = {name: {1: n} if x.dim() > 1 else None for name, x in inputs.items()}
    given = (*torch.randn(3, 1, 2, 33, 8), inputs)
    with torch.no_grad():
        program = torch.export.export(module, given, dynamic_shapes=shapes, strict=strict)
    assert "attnspec" not in str(program.graph)
    return program.module()


def standalone(body: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    path = folder / "plain_attn.py"
    path.write_text(attnspec.parse(f"attention plain {{ {body} }}").emit(standalone=True))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    module: nn.Module = importlib.import_module(path.stem).Plain()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return Positional(module).eval()


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize(
    "body", [pytest.param(x, marks=[SLOW] * (i > 0)) for i, x in enumerate(BODIES)]
)
def test_a_file_that_stands_alone_is_exported_for_every_length(
    body: str, strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = standalone(body, tmp_path, monkeypatch)
    program = exported(module, body, strict)
    for n in (2, 9, 150):
        given = (*torch.randn(3, 1, 2, n, 8), inputs_of(body, n))
        torch.testing.assert_close(program(*given), module(*given))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("causal attend linear()", "a dynamic length, since its mechanism goes by pieces"),
        ("attend favor(features = 8, seed = 0)", "`strict=False`, since its features are drawn"),
        ("attend strided(stride = isqrt(n))", "since its mask reads a root or logarithm"),
        ("attend window(radius = 3) scale 1 / n score bias()", "since its scale reads n"),
        ("attend expander(degree = 4, seed = 0)", "a dynamic length, since its pairs are drawn"),
        ("attend random(keys = 2, seed = 0)", "this file, since its pairs are drawn"),
    ],
)
def test_a_file_that_stands_alone_refuses_what_torch_would(
    body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = f"heads 2 {body}" if "bias" in body else body
    with pytest.raises(ValueError, match=f"torch.export cannot take .*{words}.*one operator"):
        exported(standalone(body, tmp_path, monkeypatch), body, False)


HERE = [
    *(
        body
        for body in BODIES
        if not any(x in body for x in ("linear", "fourier", "powers", "size =", "x(k)"))
    ),
    "attend where(k % n < max(1, n // 4) or q >= n / 2)",
]


@pytest.mark.parametrize(
    "body", [pytest.param(x, marks=[SLOW] * (i != len(HERE) - 1)) for i, x in enumerate(HERE)]
)
def test_plain_operations_in_this_process_are_exported_for_every_length(body: str) -> None:
    module = Positional(attnspec.parse(f"attention plain {{ {body} }}").compile())
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    with composed():
        program = exported(module, body, False)
    for n in (2, 9, 40):
        given = (*torch.randn(3, 1, 2, n, 8), inputs_of(body, n))
        torch.testing.assert_close(program(*given), module(*given))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("attend linear()", "laid out for one length, since `linear` is"),
        ("attend random(keys = 2, seed = 1)", "since its pairs are drawn"),
        ("attend powers(base = 3)", "since its pairs are drawn"),
        ("attend block(size = max(1, n // 8))", "since a size or a factor reads n"),
        ("attend topk(keys = 3)", "since `topk` goes by numbers"),
        ("sequence grid(1, n) attend axial", "since a grid, or a second sequence, has a length"),
        ("input x: numbers attend where(x(k) + 1 < x(q))", "the numbers of `x` are checked"),
    ],
)
def test_sizes_and_checks_that_read_numbers_are_refused_in_a_trace(body: str, words: str) -> None:
    module = Positional(attnspec.parse(f"attention plain {{ {body} }}").compile())
    with composed(), pytest.raises(ValueError, match=words):
        exported(module, body, False)
