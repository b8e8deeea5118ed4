"""What the language, a spec and a module say of graphs that the data decide."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from population import spec_of

from attnspec import SelfAttention, SpecError
from attnspec.verification import verify


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


REFUSED = """
A703 attend ~topk(keys = 4)
A703 input s: choices attend full - chosen(s)
A703 attend transpose(lsh())
A703 attend shift(cluster(), by = 1)
A703 attend topk(keys = 4, within = topk(keys = 9))
A703 attend cluster(of = q) | self
A703 attend lsh(combine = mean) + linear()
A703 attend lsh(multiplicity = true) + linear()
A703 attend sinkhorn(size = 4) + linear()
A704 causal attend cluster(of = q)
A303 attend topk(keys = 4, blocks = 2)
A303 attend topk(blocks = 4)
A306 attend topk(keys = 4, size = 2)
A306 attend topk(blocks = 4, size = 2, score = dot)
A306 attend topk(mass = 0.0, size = 2)
A306 attend topk(mass = -0.5, size = 2)
A306 input s: scores(size = 4) attend topk(blocks = 4, size = 2, score = s)
A309 input mean: scores(size = 4) attend topk(blocks = 4, size = 4, score = mean)
A313 input s: choices(size = 4) attend topk(blocks = 4, size = 4, score = s)
A313 input s: scores attend chosen(s)
A302 input s: choices(at_most = 4) attend chosen(s)
A306 input s: choices(size = 0) attend chosen(s)
A302 input h: buckets attend lsh(h, rounds = 4)
A302 input l: ids attend cluster(l, count = 4)
A306 attend lsh(hash = hyperplanes, buckets = 6)
A306 attend lsh(cut = bucket, bucket_mask = false)
A708 attend lsh() scale 0.5
A708 attend lsh(scale = unit) | lsh()
A708 attend lsh(combine = mean) | lsh(combine = mean, seed = 1)
A306 attend cluster(of = q, assign = balanced, count = 3)
A306 attend cluster(assign = balanced)
A306 causal attend sinkhorn(size = 4, cut = 2)
A306 attend sinkhorn(size = 4, cut = 9, max_blocks = 8)
"""


@pytest.mark.parametrize("line", REFUSED.strip().splitlines())
def test_meaningless_choices_are_refused(line: str) -> None:
    code, _, body = line.partition(" ")
    with pytest.raises(SpecError) as error:
        spec_of(body)
    assert [d.code for d in error.value.diagnostics] == [code]


@pytest.mark.parametrize(
    "body", ["attend topk(keys = 4)", "attend lsh()", "attend self | cluster()"]
)
def test_pairs_without_tensors_are_an_error_that_says_where_they_are(body: str) -> None:
    spec = spec_of(body)
    for ask in (spec.mask, spec.adjacency, spec.graph):
        with pytest.raises(ValueError, match=r"module\.pairs"):
            ask(16)


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
    with pytest.raises(ValueError, match="must name key blocks 0 … 4"):
        spec.mask(18, inputs={"s": choices + 1})


SCORES = "input s: scores(size = 4) attend topk(blocks = 1, size = 4, score = s)"
BUCKETS = "input s: buckets attend lsh(s, share_qk = false)"


@pytest.mark.parametrize(
    ("body", "shape", "kind", "message"),
    [
        ("input s: choices attend chosen(s)", (1, 3, 9, 2), torch.int64, "H = 4"),
        ("input s: choices attend chosen(s)", (1, 1, 8, 2), torch.int64, "n_q = 9"),
        ("input s: choices attend chosen(s)", (1, 9, 2), torch.int64, "H or H_kv"),
        ("input s: choices attend chosen(s)", (1, 1, 9, 2), torch.float32, "signed integer type"),
        (SCORES, (1, 1, 2, 3), torch.float32, "a row for each of 3 query blocks"),
        (SCORES, (1, 1, 3, 3), torch.int64, "floating type"),
        (BUCKETS, (1, 2, 1, 9), torch.int64, "H or 1"),
        (BUCKETS, (1, 1, 0, 9), torch.int64, "a round at least"),
        ("input s: ids attend cluster(s)", (1, 8), torch.int64, r"\[1, 9\], got"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    body: str, shape: tuple[int, ...], kind: torch.dtype, message: str
) -> None:
    module, wrong = spec_of(body).compile(), torch.zeros(shape, dtype=kind)
    q, k = torch.zeros(1, 4, 9, 2), torch.zeros(1, 2, 9, 2)
    with pytest.raises((ValueError, TypeError), match=message):
        module(q, k, k, inputs={"s": wrong})
    with pytest.raises(ValueError, match="needs its input `s`"):
        module(q, k, k)


@pytest.mark.parametrize("call", ["topk(keys = 4)", "lsh()", "cluster()", "sinkhorn(size = 4)"])
def test_heads_of_keys_that_do_not_divide_those_of_queries_are_refused(call: str) -> None:
    module, q, k = spec_of(f"attend {call}").compile(), *(torch.zeros(1, h, 9, 2) for h in (4, 5))
    for ask in (module, lambda q, k, _: module.pairs(q, k)):
        with pytest.raises(ValueError, match="divide those of q"):
            ask(q, k, k)


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


def test_pairs_and_choices_are_of_short_sequences() -> None:
    module = spec_of("attend topk(keys = 4)").compile()
    q = torch.zeros(1, 1, 8193, 1)
    for ask in (module.pairs, module.choices):
        with pytest.raises(ValueError, match="up to n = 8,192"):
            ask(q, q)
    with pytest.raises(ValueError, match="decide nothing"):
        spec_of("attend full").compile().choices(q[:, :, :4], q[:, :, :4])


def test_backends_that_lay_out_before_say_why_they_refuse() -> None:
    for name in ("scattered", "rows"):
        with pytest.raises(ValueError, match="queries and keys decide the pairs of `topk`"):
            spec_of("attend topk(keys = 4) | self").compile(backend=name)


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
