"""Random mask functions of torch: what is recorded of one, and what is written of that, has the
pairs that torch computes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import attnspec
from attnspec.graphs.forms.written import written
from attnspec.interchange.mask_mods import _text
from attnspec.interchange.traced import Captured, UntracedError, graph, trace

N = 9
DOC = torch.tensor([0, 0, 3, 3, 1, 1, 1, 4, 0])
MARKED = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
WIDTHS, EVEN = torch.tensor([1, 3]), torch.tensor([True, False])
NAMES = {id(DOC): "doc", id(MARKED): "marked"}
KINDS = {"doc": "ids", "marked": "tokens"}

MaskMod = Callable[[Any, Any, Any, Any], Any]


def number(draw: random.Random, depth: int) -> MaskMod:
    """A whole number made of a query, a key and a head."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(
            (
                lambda b, h, q, k: q,
                lambda b, h, q, k: k,
                lambda b, h, q, k: q - k,
                lambda b, h, q, k: h,
                lambda b, h, q, k: WIDTHS[h],
            )
        )
    x, y = number(draw, depth - 1), number(draw, depth - 1)
    asked, c = condition(draw, depth - 1, False), draw.randint(1, 5)
    made: tuple[MaskMod, ...] = (
        lambda *at: x(*at) + y(*at),
        lambda *at: x(*at) - y(*at),
        lambda *at: x(*at) + c,
        lambda *at: c - x(*at),
        lambda *at: torch.add(x(*at), y(*at), alpha=c),
        lambda *at: x(*at) * c,
        lambda *at: x(*at) // c,
        lambda *at: x(*at) % c,
        lambda *at: x(*at) >> 1,
        lambda *at: -x(*at),
        lambda *at: x(*at).abs(),
        lambda *at: torch.div(x(*at), c, rounding_mode="floor"),
        lambda *at: torch.minimum(x(*at), y(*at)),
        lambda *at: torch.maximum(x(*at), y(*at)),
        lambda *at: x(*at).clamp(-1, c),
        lambda *at: x(*at).clamp_max(c),
        lambda *at: x(*at).clamp(min=1 - c),
        lambda *at: torch.where(asked(*at), x(*at), y(*at)),
        lambda *at: torch.where(asked(*at), x(*at), c),
        lambda *at: asked(*at).to(torch.int64) * c,
        lambda *at: x(*at) * asked(*at),
        lambda *at: asked(*at) + x(*at),
        lambda *at: torch.where(asked(*at), x(*at) == c, y(*at)),
        lambda *at: x(*at).new_ones(()) * c + x(*at),
    )
    return draw.choice(made)


def condition(draw: random.Random, depth: int, inputs: bool = True) -> MaskMod:
    """A condition on a pair; of `inputs`, too, if they may be in it."""
    if inputs and draw.random() < 0.2:
        return draw.choice(
            (
                lambda b, h, q, k: DOC[q] == DOC[k],
                lambda b, h, q, k: DOC[q] != DOC[k],
                lambda b, h, q, k: MARKED[q],
                lambda b, h, q, k: MARKED[k],
                lambda b, h, q, k: MARKED[q] | MARKED[k],
            )
        )
    if depth == 0 or draw.random() < 0.3:
        x, y, c = (
            number(draw, max(0, depth - 1)),
            number(draw, max(0, depth - 1)),
            draw.randint(0, 4),
        )
        compared: tuple[MaskMod, ...] = (
            lambda b, h, q, k: q >= k,
            lambda *at: x(*at) <= y(*at),
            lambda *at: x(*at) < c,
            lambda *at: x(*at) >= c,
            lambda *at: x(*at) > y(*at),
            lambda *at: x(*at) == y(*at),
            lambda *at: x(*at) % (c + 1) == 0,
            lambda *at: x(*at) != c,
            lambda *at: x(*at).abs() % (c + 1) == 0,
            lambda *at: x(*at).to(torch.bool),
            lambda b, h, q, k: EVEN[h],
            lambda b, h, q, k: q >= 0,
            lambda b, h, q, k: h < 0,
        )
        return draw.choice(compared)
    x, y = condition(draw, depth - 1, inputs), condition(draw, depth - 1, inputs)
    asked = condition(draw, depth - 1, inputs)
    joined: tuple[MaskMod, ...] = (
        lambda *at: x(*at) & y(*at),
        lambda *at: x(*at) | y(*at),
        lambda *at: x(*at) ^ y(*at),
        lambda *at: ~x(*at),
        lambda *at: x(*at) == y(*at),
        lambda *at: x(*at) != y(*at),
        lambda *at: torch.logical_and(x(*at), y(*at)),
        lambda *at: torch.logical_not(x(*at)) | y(*at),
        lambda *at: torch.where(asked(*at), x(*at), y(*at)),
        lambda *at: x(*at) & True,
        lambda *at: x(*at) * y(*at),
        lambda *at: x(*at) + y(*at),
        lambda *at: x(*at) < y(*at),
        lambda *at: x(*at) <= y(*at),
        lambda *at: x(*at) > y(*at),
        lambda *at: x(*at) >= y(*at),
        lambda *at: torch.maximum(x(*at), y(*at)),
        lambda *at: torch.minimum(x(*at), y(*at)),
        lambda *at: x(*at) | torch.zeros_like(y(*at)),
        lambda *at: x(*at) ^ torch.ones_like(at[2], dtype=torch.bool),
    )
    return draw.choice(joined)


def pairs_of(mask_mod: MaskMod, head: int) -> np.ndarray:
    i = torch.arange(N)
    found = mask_mod(torch.tensor(0), torch.tensor(head), i[:, None], i[None])
    return np.broadcast_to(found.numpy(), (N, N))


def said_by(captured: Captured) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in captured.tensors.items()}


def test_what_is_recorded_has_the_pairs_of_the_function() -> None:
    for seed in range(90):
        mask_mod = condition(random.Random(seed), 3)
        captured = Captured(lambda tensor: NAMES[id(tensor)])
        term = graph(trace(mask_mod, captured))
        text = written(term)
        assert text in ("where(true)", "where(false)") or not re.search("true|false", text), text
        lines = [f"input {name}: {KINDS[name]}" for name in captured.tensors]
        spec = attnspec.parse(f"attention a {{ {' '.join(lines)} heads 2 attend {text} }}")
        named = attnspec.parse(_text("a", term, 2)) if seed < 20 else spec
        inputs = {name: tensor.numpy() for name, tensor in captured.tensors.items()}
        for head in range(2):
            meant = pairs_of(mask_mod, head)
            for one in (spec, named):
                read = {name: inputs[name] for name in one.inputs}
                assert (one.mask(N, head=head, inputs=read) == meant).all(), (seed, text)


EXACT: list[tuple[MaskMod, MaskMod]] = [
    (lambda b, h, q, k: q.int() * 32767 >= k, lambda b, h, q, k: q.int() * 32768 >= k),
    (lambda b, h, q, k: q.float() * 256 >= k, lambda b, h, q, k: q.float() * 257 >= k),
    (lambda b, h, q, k: q.float() / 256 >= k, lambda b, h, q, k: q.float() / 512 >= k),
    (lambda b, h, q, k: q.float() / 256 >= k, lambda b, h, q, k: q.float() / 3 >= k),
    (lambda b, h, q, k: q.float() * 0.0625 >= k, lambda b, h, q, k: q.float() * 0.00001 >= k),
    (lambda b, h, q, k: (q / 4).floor() * 1024 >= k, lambda b, h, q, k: q / 4 * 1024 >= k),
    (lambda b, h, q, k: q / 2 + k / 64 >= 3, lambda b, h, q, k: q / 8 * (k / 64) >= k),
    (lambda b, h, q, k: q.double() ** 3 >= k, lambda b, h, q, k: q.double() ** 4 >= k),
    (lambda b, h, q, k: q.double() / 3 >= k, lambda b, h, q, k: q / 3 >= k),
    (lambda b, h, q, k: q.float() >= k.float(), lambda b, h, q, k: q.half() >= k.half()),
    (lambda b, h, q, k: q * 2**40 >= k, lambda b, h, q, k: q.int() * 2**40 >= k),
]
"""Numbers of short types that are exact at every length that is checked, and others that round or
wrap."""


def test_numbers_of_short_types_are_recorded_where_they_are_exact() -> None:
    for exact, rounds in EXACT:
        trace(exact, Captured(lambda tensor: "x"))
        with pytest.raises(UntracedError, match="rounds or wraps"):
            trace(rounds, Captured(lambda tensor: "x"))


def test_a_conversion_keeps_numbers_and_cuts_none_off() -> None:
    def said(mask_mod: MaskMod) -> str:
        return written(graph(trace(mask_mod, Captured(lambda tensor: "x"))))

    assert said(lambda b, h, q, k: q.to(torch.float32).double() >= k.clone()) == "where(q >= k)"
    assert said(lambda b, h, q, k: (q >= k).to(torch.bool)) == "where(q >= k)"
    # cases that cannot be are left out
    assert said(lambda b, h, q, k: torch.where(q > 3, q, k) < 0) == "where(false)"
    assert (
        said(lambda b, h, q, k: torch.where(q > 3, q, 0 - k) < 0) == "where(q <= 3 and 0 - k < 0)"
    )
    with pytest.raises(UntracedError, match="cuts a real number off"):
        said(lambda b, h, q, k: ((q - k) / 2).int() >= 0)
    with pytest.raises(UntracedError, match="divides towards zero"):
        said(lambda b, h, q, k: torch.div(q - k, 2, rounding_mode="trunc") >= 0)
    with pytest.raises(UntracedError, match="conditions as with numbers"):
        said(lambda b, h, q, k: ((q >= k) // (q > 2)).to(torch.bool))
    with pytest.raises(UntracedError, match=r"a tensor \[3\] for a pair"):
        said(lambda b, h, q, k: q.new_ones((3,)).any())
