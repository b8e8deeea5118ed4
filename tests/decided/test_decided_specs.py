"""What the language, a spec and a module say of data-dependent graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from population import spec_of

from attnspec import SelfAttention
from attnspec.verification.verify import verify


@pytest.mark.parametrize(
    "body",
    [
        "layers 2 heads 2 attend lsh(chunk = 4) layer 1 { head 1 { attend topk(keys = 3) } }",
        "input s: choices(size = 4) causal attend chosen(s) | self",
        "attend sinkhorn(size = 4, cut = 2) score softcap(cap = 20)",
        "attend lsh(chunk = 4) + favor()",
    ],
)
def test_a_spec_goes_through_every_stage(body: str) -> None:
    spec = spec_of(body)
    assert spec.plan(64).steps
    found = verify(spec.program, 17)
    assert found.ok, str(found)
    with pytest.raises(ValueError, match="alone"):
        spec.emit(standalone=True)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_pairs_that_an_input_lists_are_known_with_it(heads: int) -> None:
    spec = spec_of(
        "heads 4 input s: choices(size = 4) causal attend chosen(s) | window(radius = 1)"
    )
    choices = np.random.default_rng(0).integers(-1, 5, (heads, 18, 3))
    q = torch.zeros(1, 4, 18, 2)
    k = torch.zeros(1, 2, 18, 2)
    held = spec.compile().pairs(q, k, inputs={"s": torch.from_numpy(choices)[None]})[0]
    for head in range(4):
        mask = spec.mask(18, head=head, inputs={"s": choices})
        assert np.array_equal(mask, held[head].numpy())
        found = spec.adjacency(18, head=head, inputs={"s": choices})
        assert np.array_equal(found.toarray(), mask)
    with pytest.raises(ValueError, match="at least 0 and below 5"):
        spec.mask(18, inputs={"s": choices + 1})


def test_pairs_of_inputs_are_those_of_queries_and_keys_that_are_there() -> None:
    module, q = (
        spec_of("input t: tokens causal attend global(t)").compile(),
        torch.zeros(2, 3, 12, 4),
    )
    marked = torch.rand(2, 12) < 0.3
    held = module.pairs(q[:, :, 7:], q, inputs={"t": marked}, key_padding_mask=marked)
    at = torch.arange(12)
    wanted = (marked[:, 7:, None] | marked[:, None]) & (at <= at[7:, None]) & marked[:, None]
    assert torch.equal(held, wanted[:, None].expand(-1, 3, -1, -1))
    assert spec_of("causal attend linear()").compile().pairs(q, q)[0, 0].sum() == 78


LEARNING = (
    "attend topk(keys = 4)",
    "attend cluster(count = 3, assign = balanced)",
    "causal attend sinkhorn(size = 4)",
)


@pytest.mark.parametrize("body", LEARNING)
def test_layers_hold_what_graphs_learn(body: str) -> None:
    layer, again = (SelfAttention(spec_of(body), 16, 2) for _ in range(2))
    x = torch.randn(2, 9, 16, requires_grad=True)
    layer.train()(x).square().sum().backward()
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again.eval()(x), layer.eval()(x))
    assert layer(x[:, :0]).shape == (2, 0, 16)


@pytest.mark.parametrize("mechanism", ["favor(features = 8)", "linear()"])
@pytest.mark.parametrize("call", ["cluster(count = 3)", "topk(keys = 3, share = head)"])
def test_beside_a_mechanism_heads_may_share_keys(call: str, mechanism: str) -> None:
    module = spec_of(f"attend {call} + {mechanism}").compile().double()
    q, k = (torch.randn(2, h, 15, 4, dtype=torch.float64) for h in (4, 2))
    whole = k.repeat_interleave(2, 1)
    assert (module(q, k, k) - module(q, whole, whole)).abs().max() < 1e-12
