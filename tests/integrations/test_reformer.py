"""`lsh` in the conventions of trax and Hugging Face against transformers' own Reformer, with the
buckets handed to both."""

from __future__ import annotations

import pytest
import torch

from attnspec.spec import parse

transformers = pytest.importorskip("transformers")

HEADS, SIZE, CHUNK, BUCKETS, N = 2, 8, 8, 6, 48


def theirs(rounds: int, look: int, causal: bool) -> torch.nn.Module:
    from transformers.models.reformer.modeling_reformer import LSHSelfAttention

    config = transformers.ReformerConfig(
        hidden_size=HEADS * SIZE,
        num_attention_heads=HEADS,
        attention_head_size=SIZE,
        lsh_attn_chunk_length=CHUNK,
        lsh_num_chunks_before=look,
        lsh_num_chunks_after=0,
        num_hashes=rounds,
        num_buckets=BUCKETS,
        is_decoder=causal,
        lsh_attention_probs_dropout_prob=0.0,
    )
    found: torch.nn.Module = LSHSelfAttention(config).double().eval()
    return found


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rounds", "look"), [(1, 0), (1, 1), (3, 0), (3, 1)])
def test_the_conventions_of_hugging_face(rounds: int, look: int, causal: bool) -> None:
    torch.manual_seed(rounds)
    layer = theirs(rounds, look, causal)
    x = torch.randn(2, N, HEADS * SIZE).double()
    buckets = torch.randint(0, BUCKETS, (2, HEADS, rounds, N))
    # theirs are numbered through all rounds
    numbered = buckets + BUCKETS * torch.arange(rounds)[:, None]
    with torch.no_grad():
        found = layer(x, buckets=numbered.flatten(2)).hidden_states
        q, v = (
            y.view(2, N, HEADS, SIZE).transpose(1, 2)
            for y in (layer.query_key(x), layer.value(x))  # type: ignore[operator]
        )
    module = parse(
        f"attention reformer {{ input h: buckets {'causal' if causal else ''} attend"
        f" lsh(h, chunk = {CHUNK}, look = {look}, scale = unit, bucket_mask = false,"
        " multiplicity = true) }"
    ).compile()
    out = module(q, q, v, inputs={"h": buckets})
    found = found.view(2, N, HEADS, SIZE).transpose(1, 2)
    # their first chunk of a round looks at the last one of the round before, ours at none
    compared = torch.ones(2, HEADS, N, dtype=torch.bool)
    if look:
        place = buckets.argsort(dim=-1, stable=True).argsort(dim=-1)
        compared = (place >= CHUNK).all(2)
    assert int(compared.sum()) > N
    # their lengths have 1e-6 added
    torch.testing.assert_close(out[compared], found[compared], rtol=1e-4, atol=1e-5)
