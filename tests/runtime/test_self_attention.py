"""The multi-head layer: every spec, projections, extra tokens, what it learns and shares."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from population import spec_of
from torch import Tensor, nn

from attnspec import SelfAttention

WIDTH, HEADS = 24, 4


def layer_of(body: str, *, layer: int = 0, **options: object) -> SelfAttention:
    torch.manual_seed(1)
    module = SelfAttention(spec_of(body), WIDTH, HEADS, layer, **options)  # type: ignore[arg-type]
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def states(n: int, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(batch, n, WIDTH, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(
    "body",
    [
        "layers 3 heads 4 attend window(radius = layers + layer + head)",
        "layers 3 attend random(keys = 2, seed = 1) layer 1 { attend full score alibi() }",
        "layers 3 heads 4 attend full score bias(buckets = 8) head 2 { attend self }",
        "layers 3 heads 4 attend linformer(rank = 4, share = none, max_length = 30)",
        "attend nystrom(landmarks = 3, conv = 3)",
        "attend synthesizer(kind = factorized_random, max_length = 30, products = true)",
        "heads 4 attend full head 1 { attend fourier() } head 2 { attend gmlp(max_length = 30) }",
    ],
)
def test_heads_go_through_the_spec(body: str) -> None:
    spec = spec_of(body)
    for layer in (0, 2):
        module = layer_of(body, layer=layer)
        x = states(17)
        parts = nn.functional.linear(x, module.in_weight, module.in_bias)
        given = dict(zip(module.read, parts.chunk(len(module.read), -1), strict=True))
        q, k, v = (
            given.get(name, given["v"]).view(2, 17, HEADS, 6).transpose(1, 2) for name in "qkv"
        )
        whole = spec.compile().double()
        whole.make_parameters(6, 6)
        mine = dict(module.attention.named_parameters())
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                # the layer holds its own row of what the spec holds for all layers
                row = parameter[layer if len(parameter) > 1 else 0]
                row.copy_(mine[name][0] if len(row) == len(mine[name][0]) else mine[name][0, :1])
                if len(row) < len(mine[name][0]):
                    mine[name][0, 1:] = mine[name][0, :1]
        out = whole(q, k, v, layer=layer).transpose(1, 2).flatten(2)
        torch.testing.assert_close(module(x), module.out(out))


def test_only_what_is_read_is_projected() -> None:
    reads = {
        "attend full": "qkv",
        "attend favor()": "qkv",
        "attend synthesizer(max_length = 9)": "qv",
        "attend synthesizer(kind = factorized_dense, max_length = 9)": "qv",
        "attend synthesizer(kind = random, max_length = 9)": "v",
        "attend synthesizer(kind = random, max_length = 9, products = true)": "qkv",
        "attend fourier()": "",
        # whose keys are queries
        "attend lsh(chunk = 4)": "qv",
        "heads 4 attend lsh(chunk = 4) head 3 { attend self }": "qkv",
        "attend mixer(hidden = 3, max_length = 9)": "",
        "attend gmlp(max_length = 9)": "qv",
        "heads 4 attend mixer(hidden = 3, max_length = 9) head 1 { attend fourier() }": "v",
        "heads 4 attend fourier() head 1 { attend gmlp(max_length = 9) }": "qv",
        "heads 4 attend mixer(hidden = 3 + head, max_length = 9)": "v",
    }
    for body, meant in reads.items():
        module = layer_of(body)
        assert module.read == meant, body
        out = module(states(7))
        assert out.shape == (2, 7, WIDTH)
        if meant:
            out.square().sum().backward()
            assert all(p.grad is not None for p in module.parameters()), body


@pytest.mark.parametrize("heads", ["", "heads 4 "])
def test_fourier_mixes_the_whole_embedding(heads: str) -> None:
    module = layer_of(f"{heads}attend fourier()")
    assert not list(module.parameters())
    x = states(13)
    torch.testing.assert_close(module(x), torch.fft.fft2(x).real)


@pytest.mark.parametrize("causal", [False, True])
def test_gmlp_is_the_block_of_the_paper(causal: bool) -> None:
    module = layer_of(f"{'causal ' if causal else ''}attend gmlp(max_length = 20)")
    learned = {name: p[0, 0] for name, p in module.attention.named_parameters()}
    x = states(13)
    z = nn.functional.gelu(nn.functional.linear(x, module.in_weight, module.in_bias))
    first, second = z.chunk(2, -1)
    second = nn.functional.layer_norm(second, (WIDTH,), learned["gmlp_gain"], learned["gmlp_shift"])
    weight = learned["gmlp_weight"][:13, :13]
    gate = (weight.tril() if causal else weight) @ second + learned["gmlp_bias"][:13, None]
    torch.testing.assert_close(module(x), module.out(first * gate))


def test_extra_tokens_stand_before_the_sequence_and_are_left_out() -> None:
    body = """
        extra_tokens 3
        input marked: tokens
        input document: ids
        input known: length
        attend window(radius = 1) | rows(first(1)) | columns(marked)
             | same(document) & prefix(known)
    """
    module = layer_of(body)
    plain = layer_of(body.replace("extra_tokens 3", ""))
    n = 12
    x = states(n)
    inputs = {
        "marked": torch.zeros(2, n, dtype=torch.bool),
        "document": torch.arange(n).expand(2, n) // 4,
        "known": torch.tensor([5, 9]),
    }
    inputs["marked"][:, 8] = True
    real = torch.ones(2, n, dtype=torch.bool)
    real[0, 10:] = False
    found = module(x, key_padding_mask=real, inputs=inputs)
    assert found.shape == x.shape
    # by hand: the same layer without extra tokens, over the longer sequence
    plain.load_state_dict({k: v for k, v in module.state_dict().items() if k != "extra"})
    longer = torch.cat([module.extra.expand(2, 3, WIDTH), x], 1)
    by_hand = {
        "marked": torch.cat([torch.zeros(2, 3, dtype=torch.bool), inputs["marked"]], 1),
        "document": torch.cat([torch.full((2, 3), -1), inputs["document"]], 1),
        "known": inputs["known"] + 3,
    }
    padding = torch.cat([torch.ones(2, 3, dtype=torch.bool), real], 1)
    meant = plain(longer, key_padding_mask=padding, inputs=by_hand)[:, 3:]
    torch.testing.assert_close(found, meant)
    found.sum().backward()
    assert module.extra.grad is not None
    assert module.extra.grad.abs().sum() > 0


def test_projections_start_as_each_of_them_would_alone() -> None:
    module, bound = SelfAttention(spec_of("attend full"), 64, 4), math.sqrt(6 / 128)
    for weight in (*module.in_weight.chunk(3), module.out.weight):
        assert 0.95 * bound < weight.abs().max() <= bound
    assert module.in_bias is not None
    assert not module.in_bias.any()
    assert not module.out.bias.any()


def test_layers_share_what_the_spec_shares() -> None:
    spec = spec_of("layers 3 attend linformer(rank = 4, share = layer, max_length = 30)")
    first = SelfAttention(spec, WIDTH, HEADS, 0)
    stack = nn.ModuleList(
        [first, *(SelfAttention(spec, WIDTH, HEADS, layer, shared=first) for layer in (1, 2))]
    )
    projections = {p for name, p in stack.named_parameters() if "linformer" in name}
    assert len(projections) == 1
    assert next(iter(projections)) is first.attention.get_parameter("linformer_keys")
    spec = spec_of("layers 3 attend linformer(rank = 4, share = head, max_length = 30)")
    first = SelfAttention(spec, WIDTH, HEADS, 0)
    other = SelfAttention(spec, WIDTH, HEADS, 1, shared=first)
    assert other.attention.linformer_keys is not first.attention.linformer_keys


@pytest.mark.parametrize(
    "body",
    [
        "extra_tokens 2 attend window(radius = 3)",
        pytest.param("attend nystrom(landmarks = 4, conv = 3)", marks=pytest.mark.slow),
        pytest.param("attend mixer(hidden = 3, max_length = 30)", marks=pytest.mark.slow),
    ],
)
def test_layers_are_exported_and_compiled(body: str) -> None:
    module = layer_of(body)
    x, real = states(9), torch.arange(9) < torch.tensor([[9], [6]])
    meant = module(x, key_padding_mask=real)
    exported = torch.export.export(module, (x,), {"key_padding_mask": real}).module()
    torch.testing.assert_close(exported(x, key_padding_mask=real), meant)
    torch.compiler.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, key_padding_mask=real), meant)


@pytest.mark.parametrize("keys", [1, 2])
def test_grouped_heads_are_repeated_ones(keys: int) -> None:
    body = "attend window(radius = 2)"
    grouped, whole = layer_of(body, num_kv_heads=keys), layer_of(body)
    size = WIDTH // HEADS
    q, k, v = torch.split(grouped.in_weight, [WIDTH, keys * size, keys * size])
    many = (x.view(keys, size, WIDTH).repeat_interleave(HEADS // keys, 0) for x in (k, v))
    assert grouped.in_bias is not None
    b, c, d = torch.split(grouped.in_bias, [WIDTH, keys * size, keys * size])
    few = (x.view(keys, size).repeat_interleave(HEADS // keys, 0).flatten() for x in (c, d))
    state = {name: x for name, x in grouped.state_dict().items() if not name.startswith("in_")}
    state["in_weight"] = torch.cat([q, *(x.flatten(0, 1) for x in many)])
    state["in_bias"] = torch.cat([b, *few])
    whole.load_state_dict(state)
    x = states(11)
    torch.testing.assert_close(grouped(x), whole(x))
    assert "num_kv_heads" in repr(grouped)


def rotary(q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Su et al. 2021: pairs of channels are turned by the position times a frequency each."""
    half = q.shape[-1] // 2
    angle = positions[:, None] * 100.0 ** -(torch.arange(half, dtype=q.dtype) / half)
    cos, sin = torch.cos(angle), torch.sin(angle)

    def turned(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    return turned(q), turned(k)


@pytest.mark.parametrize("extra", [0, 2])
def test_rotary_positions_turn_queries_and_keys(extra: int) -> None:
    module = layer_of(
        f"extra_tokens {extra} attend full" if extra else "attend full", rotary=rotary
    )
    x = states(9)
    longer = torch.cat([module.extra.expand(2, -1, -1), x], 1) if extra else x
    parts = nn.functional.linear(longer, module.in_weight, module.in_bias).chunk(3, -1)
    q, k, v = (torch.unflatten(part, 2, (HEADS, -1)).transpose(1, 2) for part in parts)
    q, k = rotary(q, k, torch.arange(9 + extra))
    meant = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(WIDTH / HEADS), -1) @ v
    torch.testing.assert_close(module(x), module.out(meant.transpose(1, 2).flatten(2)[:, extra:]))
    # what counts is how far apart tokens are
    moved = layer_of("attend full", rotary=lambda q, k, at: rotary(q, k, at + 17))
    if not extra:
        torch.testing.assert_close(moved(x), module(x))
        assert not torch.allclose(layer_of("attend full")(x), module(x))


@pytest.mark.parametrize(
    "body",
    [
        "causal attend window(before = 3, after = 0) | columns(first(1))",
        "extra_tokens 2 causal attend window(before = 4, after = 0)",
        "causal attend window(before = 3, after = 0) + linear()",
        "layers 3 heads 4 causal attend window(before = 1 + head + layer, after = 0)",
        "causal attend residue(step = 3)",
    ],
)
def test_steps_are_the_rows_of_the_whole_pass(body: str) -> None:
    for options in ({}, {"num_kv_heads": 2, "rotary": rotary}):
        module = layer_of(body, layer=1 if "layers" in body else 0, **options)
        x, state, outs = states(13), None, []
        real = torch.arange(13) >= torch.tensor([[0], [3]])
        for start, stop in ((0, 5), (5, 5), (5, 6), (6, 13)):
            padding = real[:, start:stop]
            out, state = module.step(
                x[:, start:stop], state, key_padding_mask=padding, keep_all="residue" in body
            )
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 1), module(x, key_padding_mask=real))


@pytest.mark.parametrize(
    "body", ["extra_tokens 2 attend full", "attend gmlp(max_length = 30)", "attend fourier()"]
)
def test_copies_and_generators_decide_all_that_is_learned(body: str) -> None:
    module, fresh = layer_of(body), SelfAttention(spec_of(body), WIDTH, HEADS).double()
    fresh.load_state_dict(module.state_dict())
    stream = io.BytesIO()
    torch.save(module, stream)
    stream.seek(0)
    x = states(9)
    for same in (fresh, copy.deepcopy(module), torch.load(stream, weights_only=False)):
        torch.testing.assert_close(same(x), module(x))
    assert module(states(0)).shape == (2, 0, WIDTH)
    kept = []
    for seed in (1, 1, 2):
        module.reset_parameters(torch.Generator().manual_seed(seed))
        kept.append([p.detach().clone() for p in module.parameters()])
    assert all(map(torch.equal, kept[0], kept[1]))
    assert not kept[0] or not all(map(torch.equal, kept[0], kept[2]))


def test_dropout_is_for_training_and_autocast_narrows() -> None:
    module, x = layer_of("attend window(radius = 3)", dropout=0.5), states(9)
    assert not torch.equal(module(x), module(x))
    meant = module.eval()(x)
    assert torch.equal(module(x), meant)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = module.float()(x.float())
    assert narrow.dtype == torch.bfloat16
    for found in (narrow, module.bfloat16()(x.bfloat16())):
        assert (found.float() - meant).abs().max() < 0.05
