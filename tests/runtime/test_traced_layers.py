"""Layers and calls under torch.compile: what computes the same is one graph."""

from __future__ import annotations

import pytest
import torch
from attention_checks import module_of, tensors
from torch._dynamo.utils import counters

import attnspec


@pytest.mark.parametrize(
    ("body", "different"),
    [
        ("layers 12 causal attend window(before = 7, after = 0)", 1),
        ("layers 12 attend full layer 3 { attend block(size = 4) }", 2),
        ("layers 3 attend random_blocks(size = 4, blocks = 2, seed = 1)", 3),
    ],
)
def test_layers_that_compute_the_same_are_one_graph(body: str, different: int) -> None:
    spec = attnspec.parse(f"attention a {{ {body} }}")
    x, total = torch.randn(2, 33, 32), spec.program.layers or 1
    layers = [attnspec.SelfAttention(spec, 32, 4, layer=i) for i in range(total)]
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    for layer in layers:
        meant = layer(x)
        layer.compile(fullgraph=True, backend="eager")
        torch.testing.assert_close(layer(x), meant)
    assert counters["stats"]["unique_graphs"] == before + different


@pytest.mark.parametrize(
    "body",
    ["causal attend window(before = 7, after = 0)", "input doc: ids causal attend same(doc)"],
)
def test_a_call_says_how_many_slots_of_a_cache_are_keys(body: str) -> None:
    module = module_of(body)
    given = [x.requires_grad_() for x in tensors(2, 4, 3, 20)]
    real = torch.rand(2, 20, generator=torch.Generator().manual_seed(0)) > 0.2
    doc = {"doc": torch.arange(20).repeat(2, 1) // 5} if "doc" in body else {}
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    traced = torch.compile(module, fullgraph=True, backend="aot_eager")
    for count in (4, 19, 20):
        short = [given[0], *(x[:, :, :count] for x in given[1:])]
        cut = {name: x[:, :count] for name, x in doc.items()}
        meant = module(*short, key_padding_mask=real[:, :count], inputs=cut)
        grads = torch.autograd.grad(meant.square().sum(), given)
        for run in (module, traced):
            keys = torch.tensor(count)
            out = run(*given, keys=keys, key_padding_mask=real, inputs=doc)
            torch.testing.assert_close(out, meant)
            torch.testing.assert_close(torch.autograd.grad(out.square().sum(), given), grads)
    assert counters["stats"]["unique_graphs"] == before + 1


def test_a_number_of_keys_that_cannot_be_is_refused() -> None:
    module, (q, k, v) = module_of("causal attend full"), tensors(1, 2, 3, 9)
    for count in (2, 10):
        with pytest.raises(ValueError, match=f"keys must count the 3 queries.* got {count}"):
            module(q, k, v, keys=torch.tensor(count))
    with pytest.raises(ValueError, match="how many keys count is a number"):
        with attnspec.runtime.composed():
            torch.export.export(module, (q, k, v), {"keys": torch.tensor(5)}, strict=False)
