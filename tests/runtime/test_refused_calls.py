"""Calls that do not fit, as tests/golden/test_refused_calls lists them: the type of the error, and
what is said of the shapes and the way out.

An entry is `TYPE: EXPRESSION`, or `accepted: EXPRESSION`, of the names that stand here.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from textwrap import wrap
from typing import Any

import numpy as np
import pytest
import torch
from attention_checks import exported, tensors
from goldens import Golden
from population import spec_of
from torch import Tensor, arange, ones, zeros

from attnspec import (
    AttnSpecError,
    MultiheadAttention,
    SelfAttention,
    SpecError,
    __version__,
    packed,
)
from attnspec.compile.standalone import standalone_module

__all__ = ["arange", "exported", "np", "ones"]

WIDTH, HEADS = 24, 4
LONG = torch.int64
PUBLIC = (AttnSpecError, SpecError)


def parts(n: int, n_q: int | None = None, heads: int = 4, keys: int = 4, d: int = 8) -> Any:
    """q, k and v of two samples."""
    made = tensors(2, heads, n if n_q is None else n_q, n, key_heads=keys, size=d)
    return [x.detach() for x in made]


Q, K, V = parts(10)
X = torch.randn(2, 9, WIDTH).double()
ROWS, OTHERS = torch.randn(9, 2, WIDTH).double(), torch.randn(5, 2, WIDTH).double()
BITS = torch.ones(2, 10, dtype=torch.bool)
TEXT = spec_of("input doc: ids causal scale 1 / 8 attend same(doc)").emit()


def compiled(body: str, **options: Any) -> Any:
    return spec_of(body).compile(**options)


def emitted(old: str = "", new: str = "") -> Any:
    """The module of a text that was written, of which some is another."""
    space: dict[str, Any] = {"__name__": "emitted"}
    assert old in TEXT
    exec(TEXT.replace(old, new) if old else TEXT, space)
    return space["Sample"]()


def alone(body: str) -> Any:
    """The module of a file that stands alone."""
    space: dict[str, Any] = {"__name__": "alone"}
    exec(standalone_module(spec_of(body).program, "Sample"), space)
    return space["Sample"](4) if "PARTS" in space else space["Sample"]()


def sums(body: str, batch: int = 2, n_q: int = 30, n: int = 30) -> None:
    """A call that asks for log-sum-exps, after one that does not; inputs are labels."""
    inputs = {"d": zeros(batch, n, dtype=LONG)} if "input" in body else None
    module, given = compiled(body, head_size=8), tensors(batch, 4, n_q, n)
    module(*given, inputs=inputs)
    module(*given, inputs=inputs, return_lse=True)


def marked(**change: Any) -> Any:
    """A call of 60 positions with its inputs, of which some are others, or missing."""
    body = (
        "input important: tokens(at_most = 9) input doc: ids input size: length"
        " attend (window(radius = 3) | global(important | first(1))) & same(doc) | prefix(size)"
    )
    marks, doc = arange(60)[None] % 11 == arange(2)[:, None], arange(60).expand(2, 60) // 20
    inputs = {"important": marks, "doc": doc, "size": arange(2), **change}
    given = {name: x for name, x in inputs.items() if x is not None}
    return compiled(body)(*parts(60), inputs=given)


def starts(body: str, start: Any) -> None:
    """A call whose queries start somewhere; where its pairs are asked for, the same is said."""
    module, (q, k, v), said = compiled(body), parts(5), []
    for call in (module, lambda q, k, _, **rest: module.pairs(q, k, **rest)):
        with pytest.raises((TypeError, ValueError)) as error:
            call(q, k, v, query_start=start)
        said.append(error.value)
    assert str(said[0]) == str(said[1])
    raise said[0]


def stepped(body: str, *inputs: Mapping[str, Any], layer: int = 0, n: int = 3, d: int = 8) -> Any:
    """A step of n positions for each set of inputs; the last state."""
    module, (q, k, v), state = compiled(body, head_size=8), parts(n, heads=2, keys=2, d=d), None
    for data in inputs or ({},):
        _, state = module.step(q, k, v, state, inputs=data, layer=layer)
    return state


def multihead(body: str, *given: Any, **options: Any) -> Any:
    """A module in place of torch's, or a call of one."""
    learned = {name: options.pop(name) for name in [*options] if name.startswith("add_")}
    module = MultiheadAttention(WIDTH, HEADS, spec=spec_of(body), dtype=X.dtype, **learned)
    return module(*given, **options) if given else module


def layer(spec: Any = "attend full", width: Any = WIDTH, at: Any = 0, **options: Any) -> Any:
    spec = spec_of(spec) if isinstance(spec, str) and " " in spec else spec
    return SelfAttention(spec, width, HEADS, at, **options).double()


def rotary(q: Tensor, k: Tensor, at: Tensor) -> Any:
    return q, k


# documents of these lengths; queries, keys and values of their tokens
LENGTHS = (4, 0, 7, 1, 7, 13, 4)
A, B, C = (torch.randn(36, heads, 8).double() for heads in (4, 2, 2))


def ends(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


ENDS, ONE, TWO = ends(*LENGTHS), torch.tensor([0, 1, 36]), torch.tensor([0, 3, 36])


def documents(*given: Any, body: Any = "causal attend full", **options: Any) -> Tensor:
    module: Any = compiled(body, head_size=8).double() if isinstance(body, str) else body
    return packed(module, *given, **options)


def nested(x: Tensor, at: Tensor = ENDS) -> Tensor:
    """Documents of tokens [T, H, d] as a nested tensor [B, j, H, d]."""
    return torch.nested.nested_tensor_from_jagged(x, at)


def answer(line: str) -> tuple[str, list[str]]:
    """What comes of `TYPE: EXPRESSION`."""
    asked = line.partition(": ")[2]
    try:
        eval(asked, globals())
    except (ImportError, TypeError, ValueError) as error:
        said = str(error).replace(__version__, "VERSION")
        assert "``" not in said, said
        words = [each for row in said.splitlines() for each in wrap(row, 96) or [""]]
        # those that callers can name
        types = (x for x in type(error).__mro__ if hasattr(builtins, x.__name__) or x in PUBLIC)
        return f"{next(types).__name__}: {asked}", words
    return f"accepted: {asked}", []


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(
    "table", ["calls", "inputs", "modules", "steps", "backends", "files", "exports"]
)
def test_calls_that_are_refused(table: str, golden: Golden) -> None:
    golden.entries(answer)


def test_a_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"must be available on this machine \(cpu.*, got 'cuda:63'"
    ):
        spec_of("attend full").compile(device="cuda:63")
