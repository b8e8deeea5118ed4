"""The table of what torch does with modules: each cell is what happens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_checks import tensors
from population import spec_of
from torch import Tensor
from transcripts import blocks, run_python
from transforms import KINDS, PAGE, ROWS, WORKS, Kind, Row, line, outcome, refusal_of

from attnspec.runtime import composed

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * row.slow) for row in ROWS], ids=str
)
# exporters warn of what they import
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_row_is_what_happens(row: Row) -> None:
    found = [outcome(row, kind) for kind in KINDS]
    assert line(row, found) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_every_row_once() -> None:
    table = PAGE.read_text(encoding="utf-8").split("transforms -->")[1].splitlines()
    titles = [row.split("|")[1].strip() for row in table if row.startswith("| ")]
    assert titles == ["", *(row.title for row in ROWS)]


def test_an_error_of_torch_is_no_refusal() -> None:
    def broken(kind: Kind) -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        outcome(Row("broken", broken), KINDS[0])
    assert refusal_of(None) == ""
    (scripted,) = (row for row in ROWS if row.title == "`torch.jit.script`")
    assert outcome(scripted, KINDS[0]) != WORKS


def test_the_ways_out_of_a_refused_trace_work() -> None:
    module = spec_of("attend window(radius = 3)").compile().double()
    given = tensors(2, 2, 12, 12)

    def slope(run: Callable[..., Any]) -> Tensor:
        found: Tensor = torch.func.jvp(run, given, given)[1]
        return found

    def curved(run: Callable[..., Any]) -> Tensor:
        leaves = [x.clone().requires_grad_() for x in given]
        (grad,) = torch.autograd.grad(run(*leaves).square().sum(), leaves[:1], create_graph=True)
        (found,) = torch.autograd.grad(grad.square().sum(), leaves[:1])
        return found

    @torch.compile(backend="eager", fullgraph=True)
    def compiled(q: Tensor) -> Tensor:
        def grad(q: Tensor) -> Any:
            return torch.func.grad(lambda q: module(q, *given[1:]).sum())(q).square().sum()

        found: Tensor = torch.func.grad(grad)(q)
        return found

    ways = r"call the module itself.* or export it under `attnspec.runtime.composed\(\)`"
    with pytest.raises(RuntimeError, match="second derivatives of an attention .*" + ways):
        compiled(given[0])
    exported = torch.export.export(module, given).module()
    with pytest.raises(RuntimeError, match="jvp.* of an attention is not computed .*" + ways):
        slope(exported)
    with composed():
        plain = torch.export.export(module, given).module()
    torch.testing.assert_close(slope(plain), slope(module))
    for run in (exported, plain):
        torch.testing.assert_close(curved(run), curved(module))


def test_the_pages_python_runs() -> None:
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(PAGE.read_text(encoding="utf-8"))):
        run_python(block, names, f"{PAGE.name}, block {number}")
