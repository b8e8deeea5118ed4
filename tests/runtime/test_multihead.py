"""The drop-in for torch's own class: its numbers with `attend full`, the spec's with others."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from attention_checks import with_gradients
from limited import REFUSING
from population import spec_of
from torch import Tensor, nn

from attnspec import MultiheadAttention

WIDTH, HEADS, BATCH, QUERIES, KEYS = 24, 4, 2, 5, 7

OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"bias": False, "batch_first": True},
    {"kdim": 10, "vdim": 12},
    {"kdim": 10, "batch_first": True, "add_bias_kv": True},
    {"add_zero_attn": True, "bias": False},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
)


def ours(body: str = "attend full", **options: Any) -> MultiheadAttention:
    torch.manual_seed(3)
    module = MultiheadAttention(WIDTH, HEADS, spec=spec_of(body), dtype=torch.float64, **options)
    moved(module)
    return module


def moved(module: nn.Module) -> None:
    """The module with biases that are not zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.1 * noise)


def pair(**options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64, **options)
    moved(theirs)
    return theirs, ours(**options)


def tokens(n: int, width: int = WIDTH, *, first: bool = False, batch: int = BATCH) -> Tensor:
    shape = (batch, n, width) if first else (n, batch, width)
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def masks(queries: int, keys: int) -> list[dict[str, Any]]:
    padding = torch.zeros(BATCH, keys, dtype=torch.bool)
    padding[1, 4:] = True
    blocked = torch.rand(queries, keys) > 0.7
    blocked[:, 0] = False
    numbers = torch.randn(queries, keys, dtype=torch.float64, requires_grad=True)
    lowest = torch.zeros(BATCH, keys, dtype=torch.float64).masked_fill(padding, -torch.inf)
    each = torch.rand(BATCH * HEADS, queries, keys) > 0.7
    each[..., 1] = False
    return [
        {},
        {"need_weights": False},
        {"key_padding_mask": padding},
        {"key_padding_mask": lowest, "need_weights": False},
        {"key_padding_mask": torch.randn(BATCH, keys, dtype=torch.float64)},
        {"attn_mask": blocked, "key_padding_mask": padding},
        {"attn_mask": numbers, "key_padding_mask": lowest, "need_weights": False},
        {"attn_mask": each, "average_attn_weights": False},
    ]


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_full_attention_is_that_of_torch(options: dict[str, Any], more: bool) -> None:
    queries, keys = (KEYS, QUERIES) if more else (QUERIES, KEYS)
    theirs, mine = pair(**options)
    found, wanted = mine.state_dict(), theirs.state_dict()
    # drawn in the same order from the same numbers, under the same names
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    mine.load_state_dict(wanted)
    first = options.get("batch_first", False)
    parts = (
        tokens(queries, first=first),
        tokens(keys, options.get("kdim", WIDTH), first=first),
        tokens(keys, options.get("vdim", WIDTH), first=first),
    )
    for given in masks(queries, keys):
        meant, weights = theirs(*parts, **given)
        out, shown = mine(*parts, **given)
        torch.testing.assert_close(shown, weights)
        # a learned mask has gradients, too
        added = [x for x in given.values() if isinstance(x, Tensor) and x.requires_grad]
        for one, other in zip(
            with_gradients(out, [*parts, *mine.parameters(), *added]),
            with_gradients(meant, [*parts, *theirs.parameters(), *added]),
            strict=True,
        ):
            torch.testing.assert_close(one, other)


BODIES = (
    "attend window(radius = 1)",
    "causal attend window(before = 2, after = 0) score alibi() head 1 { attend full }",
    "heads 4 attend full score bias(buckets = 4) normalize softmax1",
    "attend block(size = 3) normalize relu",
    "attend topk(keys = 2)",
    "attend lsh(buckets = 2, rounds = 2, chunk = 4)",
    "attend window(radius = 1) + linear()",
    "input d: ids attend same(d)",
)


def by_hand(module: MultiheadAttention, x: Tensor, inputs: Any, real: Tensor) -> Tensor:
    """Projections, the spec's attention, the projection back; x [B, n, E]."""
    parts = nn.functional.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    q, k, v = (torch.unflatten(part, 2, (HEADS, -1)).transpose(1, 2) for part in parts)
    if module.shared:
        k = q
    out = module.attention(q, k, v, key_padding_mask=real, inputs=inputs)
    return module.out_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", BODIES)
def test_heads_read_the_pairs_of_the_spec(body: str) -> None:
    module, x = (
        ours("heads 4 " * ("head 1" in body) + body, batch_first=True),
        tokens(9, first=True),
    )
    inputs = {"d": torch.arange(9).expand(BATCH, 9) // 4} if "ids" in body else None
    padding = torch.arange(9) > torch.tensor([[8], [6]])
    out, _ = module(x, x, x, padding, need_weights=False, inputs=inputs)
    leaves = [x, module.in_proj_weight]
    meant = with_gradients(by_hand(module, x, inputs, ~padding), leaves)
    for one, other in zip(with_gradients(out, leaves), meant, strict=True):
        torch.testing.assert_close(one, other)
    again, weights = module(x, x, x, padding, average_attn_weights=False, inputs=inputs)
    torch.testing.assert_close(again, out)
    if "+" not in body and "lsh" not in body:
        q, k, _ = module._heads(x, x, x)
        pairs = module.attention.pairs(q, k, inputs=inputs, key_padding_mask=~padding)
        assert not weights[~pairs].any()


@pytest.mark.parametrize("body", [*BODIES[:5], BODIES[7]])
def test_a_mask_takes_pairs_away(body: str) -> None:
    module = ours("heads 4 " * ("head 1" in body) + body, batch_first=True)
    x, later = tokens(9, first=True), torch.ones(9, 9, dtype=torch.bool).triu(1)
    inputs = {"d": torch.arange(9).expand(BATCH, 9) // 4} if "ids" in body else None
    out, weights = module(x, x, x, attn_mask=later, inputs=inputs)
    # a choice is another one where later keys are known, and so are buckets of one side
    if "topk" not in body and "bias" not in body:
        causal = body if "causal" in body else f"causal {body}"
        same = ours("heads 4 " * ("head 1" in body) + causal, batch_first=True)
        torch.testing.assert_close(out, same(x, x, x, inputs=inputs)[0])
    assert not weights[:, later].any()
    # numbers that block nothing change nothing
    zeros = torch.zeros(9, 9, dtype=torch.float64)
    torch.testing.assert_close(
        module(x, x, x, attn_mask=zeros, inputs=inputs), module(x, x, x, inputs=inputs)
    )


def test_a_causal_spec_needs_no_look_at_a_causal_mask() -> None:
    module, x = ours("causal attend window(before = 2, after = 0)"), tokens(9)
    meant = module(x, x, x, need_weights=False)[0]
    wrong = torch.zeros(9, 9, dtype=torch.bool)
    # a hint is believed, as torch believes it
    found = module(x, x, x, attn_mask=wrong, is_causal=True, need_weights=False)[0]
    assert torch.equal(found, meant)
    assert torch.equal(module(x, x, x, is_causal=True, need_weights=False)[0], meant)


def test_views_of_one_tensor_and_no_tokens() -> None:
    window, x = ours("attend window(radius = 1)"), tokens(9)
    wanted = window(x, x, x)[0]
    assert torch.equal(window(x[:], x.view_as(x), x)[0], wanted)
    torch.testing.assert_close(window(x[:, 0], x[:, 0], x[:, 0])[0], wanted[:, 0])
    for n, batch in ((0, 2), (1, 2), (3, 0)):
        x = tokens(n, batch=batch)
        for given in ({}, {"attn_mask": torch.zeros(n, n, dtype=torch.bool)}):
            out, weights = window(x, x, x, **given)
            assert (out.shape, weights.shape) == (x.shape, (batch, n, n))


def test_padding_everywhere_gives_zeros_where_torch_gives_nan() -> None:
    module, x = ours("attend window(radius = 2)", bias=False), tokens(6)
    for padding in (torch.ones(BATCH, 6) > 0, torch.full((BATCH, 6), -torch.inf).double()):
        out, weights = module(x, x, x, padding)
        assert not out.any()
        assert not weights.any()
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert not grad.any()


def test_extra_keys_go_with_every_spec_of_a_softmax() -> None:
    module = ours(
        "attend window(radius = 1) normalize softmax1", add_bias_kv=True, add_zero_attn=True
    )
    x = tokens(6)
    out, weights = module(x, x, x, average_attn_weights=False)
    assert weights.shape == (BATCH, HEADS, 6, 8)
    near = (torch.arange(6)[:, None] - torch.arange(6)).abs() <= 1
    q, k, _ = module._heads(x, x, x)
    scores = (q @ k.transpose(-1, -2) / 6**0.5).masked_fill(~near, -torch.inf)
    assert module.bias_k is not None
    learned = (q * module.bias_k.view(1, HEADS, 1, 6)).sum(-1, keepdim=True) / 6**0.5
    zero = torch.zeros_like(learned)
    # softmax1 has a zero logit of its own
    every = torch.softmax(torch.cat([scores, learned, zero, zero], -1), -1)[..., :-1]
    torch.testing.assert_close(weights, every)
    torch.testing.assert_close(out, module(x, x, x, need_weights=False)[0])


def layer_with(body: str, kind: Any = nn.TransformerEncoderLayer, **options: Any) -> Any:
    torch.manual_seed(1)
    layer = kind(WIDTH, HEADS, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    layer.self_attn = MultiheadAttention(
        WIDTH, HEADS, batch_first=True, dtype=torch.float64, spec=spec_of(body), **options
    )
    return layer


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_an_encoder_that_was_built_before_says_what_to_do() -> None:
    plain = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True, dtype=torch.float64)
    stack = nn.TransformerEncoder(plain, 2).eval()
    for layer in stack.layers:
        layer.self_attn = ours("attend window(radius = 1)", batch_first=True)
    x, padding = tokens(9, first=True).detach(), torch.arange(9) > torch.tensor([[8], [6]])
    with torch.no_grad(), pytest.raises(TypeError, match="enable_nested_tensor=False"):
        stack(x, src_key_padding_mask=padding)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
def test_encoders_and_decoders_apply_the_spec(training: bool) -> None:
    body, behind = "causal attend window(before = 2, after = 0)", torch.arange(9)[:, None]
    mask = (behind < torch.arange(9)) | (behind > torch.arange(9) + 2)
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64}
    x, padding = tokens(9, first=True).detach(), torch.arange(9) > torch.tensor([[8], [6]])
    stack = nn.TransformerEncoder(layer_with(body), 2).train(training)
    plain = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 32, **options), 2)
    plain.load_state_dict(stack.state_dict())
    with torch.no_grad():
        meant = plain.train(training)(x, mask=mask, src_key_padding_mask=padding)[~padding]
        for given in ({}, {"mask": behind < torch.arange(9)}):
            found = stack(x, src_key_padding_mask=padding, **given)
            torch.testing.assert_close(found[~padding], meant)
    layer = layer_with(body, nn.TransformerDecoderLayer).train(training)
    layer.multihead_attn = ours(batch_first=True)
    other = nn.TransformerDecoderLayer(WIDTH, HEADS, 32, **options).train(training)
    other.load_state_dict(layer.state_dict())
    memory = tokens(7, first=True)
    meant = other(x, memory, tgt_mask=mask)
    torch.testing.assert_close(layer(x, memory, tgt_is_causal=True), meant)


def test_dropout_copies_and_sequences_without_a_batch() -> None:
    module, x = ours("heads 4 attend full score bias(buckets = 4)", dropout=0.5), tokens(KEYS)
    assert isinstance(module, nn.MultiheadAttention)
    assert set(module.state_dict()) - set(pair()[0].state_dict()) == {"attention.bias_0"}
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    assert (module(x, x, x, average_attn_weights=False)[1] == 0).any()
    module.eval()
    for same in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(same(x, x, x), module(x, x, x))
    meta = MultiheadAttention(WIDTH, HEADS, spec=spec_of("attend full"), device="meta")
    assert {x.device.type for x in meta.parameters()} == {"meta"}
    for first in (False, True):
        theirs, mine = pair(batch_first=first)
        one, padding = tokens(KEYS)[:, 0], torch.arange(KEYS) > 4
        later = torch.ones(HEADS, KEYS, KEYS).triu(1) > 0
        for given in (
            {"key_padding_mask": padding},
            {"average_attn_weights": False, "attn_mask": later},
        ):
            torch.testing.assert_close(mine(one, one, one, **given), theirs(one, one, one, **given))


def test_one_graph_under_compile() -> None:
    module, x = ours("attend window(radius = 1)").float(), tokens(9).detach().float()
    padding = torch.zeros(BATCH, 9).masked_fill(torch.arange(9) > 6, -torch.inf)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for given in ({}, {"need_weights": False}, {"key_padding_mask": padding}):
        torch.testing.assert_close(compiled(x, x, x, **given), module(x, x, x, **given))
    with pytest.raises(RuntimeError, match="key_padding_mask must hold only 0 and -inf"):
        compiled(x, x, x, key_padding_mask=padding + 1)


@pytest.mark.limits(REFUSING)
def test_weights_of_many_keys_are_refused() -> None:
    full, x = ours(), tokens(9)
    with pytest.raises(ValueError, match="up to 8 keys, got 9: pass need_weights=False"):
        full(x, x, x)
    full(x, x, x, need_weights=False)


@pytest.mark.parametrize(("queries", "keys"), [(5, 7), (9, 4), (1, 1)])
def test_a_spec_of_two_sequences_reads_another(queries: int, keys: int) -> None:
    body = "cross attend where(abs(q * n - k * m) <= 2 * m) | columns(first(1))"
    theirs, _ = pair(batch_first=True)
    mine = ours(body, batch_first=True)
    q, k = tokens(queries, first=True), tokens(keys, first=True)
    blocked = torch.tensor(~spec_of(body).mask(keys, m=queries))
    wanted = theirs(q, k, k, attn_mask=blocked)
    for more in ({}, {"attn_mask": blocked}):
        for found, each in zip(mine(q, k, k, **more), wanted, strict=True):
            torch.testing.assert_close(found, each)
