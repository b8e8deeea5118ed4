"""In 16 bits no row is further from the definition than twice what torch's own call is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from zoo import ATTENTIONS, IDS, loaded, sample

from attnspec.graphs.relation import evaluate_pairs
from attnspec.spec import Spec, parse

HALF = (torch.bfloat16, torch.float16)

BODIES = (
    "causal attend window(before = 127, after = 0) | columns(first(1))",
    "causal attend window(before = 63, after = 0) | residue(step = 32)",
    "attend window(radius = 40) | rows(first(3)) | columns(first(3))",
    "attend block(size = 64) | columns(first(2))",
    "causal attend topk(blocks = 3, size = 32) | window(before = 40, after = 0)",
    "causal heads 2 head 0 { attend full } head 1 { attend residue(step = 16) | self }",
)


def worst(found: torch.Tensor, true: torch.Tensor) -> float:
    """The greatest error of a row, relative to the row, or to a tenth of a mean one."""
    size = true.norm(dim=-1)
    errors = (found.double() - true).norm(dim=-1) / size.clamp(min=0.1 * float(size.mean()))
    return float(errors.max())


def run(
    attend: Callable[..., torch.Tensor], parts: Sequence[torch.Tensor], grad: torch.Tensor
) -> list[torch.Tensor]:
    """The output, and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in parts]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


def tensors(heads: int, n: int, kind: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and a gradient of the output."""
    generator = torch.Generator().manual_seed(n)
    return [x.to(kind) for x in torch.randn(4, 1, heads, n, 64, generator=generator)]


def compare(spec: Spec, n: int, kind: torch.dtype, **given: Any) -> None:
    """Outputs and gradients beside those of torch's own call with the same pairs; and outputs of
    autocast are the same bits."""
    module = spec.compile()
    *parts, grad = tensors(spec.program.heads or 1, n, kind)
    mask = module.pairs(parts[0], parts[1], **given)
    # torch's call has no number for a row without a key
    grad = grad.masked_fill(~mask.any(-1, keepdim=True), 0.0)
    mask = mask | ~mask.any(-1, keepdim=True)

    def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask) * (grad != 0)

    true = run(own, [x.double() for x in parts], grad)
    theirs = run(own, parts, grad)
    ours = run(lambda *x: module(*x, **given), parts, grad)
    for name, a, b, t in zip("out q k v".split(), ours, theirs, true, strict=True):
        assert worst(a, t) <= 2 * worst(b, t), name
    with torch.autocast("cpu", kind):
        assert torch.equal(module(*(x.float() for x in parts), **given), ours[0])


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("body", BODIES)
def test_rows_and_gradients_are_as_exact_as_those_of_torch(body: str, kind: torch.dtype) -> None:
    compare(parse(f"attention a {{ {body} }}"), 1500, kind)


@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize("steps", [1, 70])
def test_a_step_is_as_exact_as_the_whole_pass(steps: int, kind: torch.dtype) -> None:
    module, n = parse(f"attention a {{ {BODIES[0]} }}").compile(), 700
    *parts, _ = tensors(1, n, kind)
    state, outs = None, []
    for q, k, v in zip(*(torch.split(x, steps, 2) for x in parts), strict=True):
        out, state = module.step(q, k, v, state)
        outs.append(out)
    mask = module.pairs(*parts[:2])
    wide = [x.double() for x in parts]
    true, own = (scaled_dot_product_attention(q, k, v, attn_mask=mask) for q, k, v in (wide, parts))
    for found in (torch.cat(outs, 2), module(*parts)):
        assert worst(found, true) <= 2 * worst(own, true)


@pytest.mark.parametrize("backend", ["auto", "bands", "tiles"])
def test_a_small_share_is_not_rounded_away(backend: str) -> None:
    text = "attention a { causal attend window(before = 2047, after = 0) | columns(first(1)) }"
    q = torch.zeros(1, 1, 4096, 16, dtype=torch.bfloat16)
    v = torch.zeros_like(q)
    v[:, :, 0] = 1000.0
    out = parse(text).compile(backend=backend)(q, q, v)
    assert out[0, 0, -1, 0].item() == pytest.approx(1000 / 2049, rel=2**-8)


def test_gradients_of_tables_are_sums_in_float32() -> None:
    text = "attention a { heads 1 attend window(radius = 200) score bias(buckets = 4) }"
    grads = []
    for kind in (torch.float64, torch.bfloat16):
        module = parse(text).compile().to(kind)
        *parts, grad = (x.to(kind) for x in tensors(1, 1500, torch.bfloat16))
        # values of one sign, of which the gradients of a bucket do not cancel
        at = torch.arange(1500)[:, None] / 1500
        (found,) = torch.autograd.grad(
            module(parts[0], parts[1], at.to(kind).expand(1, 1, -1, 64)),
            [*module.parameters()],
            grad.abs(),
        )
        grads.append(found.flatten())
    assert worst(grads[1], grads[0].double()) < 0.02


PLAIN = [
    pytest.param(*each, id=label)
    for each, label in zip(ATTENTIONS, IDS, strict=True)
    if all(
        part.mechanism is None
        and part.normalize == "softmax"
        and not part.scores
        and not part.scale
        for part in loaded(*each).program.attends
    )
    and not loaded(*each).program.cross
    # these average rounds, or attend something else than q and k
    and not any(
        word in each[1] for word in ("reformer", "clustered", "routing", "sort", "sinkhorn")
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize(("path", "name"), PLAIN)
def test_the_zoo_is_as_exact_as_torch(path: Path, name: str, kind: torch.dtype) -> None:
    spec = loaded(path, name)
    n = spec.program.fixed_length or 1500
    if n > 4096:
        pytest.skip("the dense reference takes too much memory")
    data = {x: torch.as_tensor(y)[None] for x, y in sample(spec, n).items()}
    compare(spec, n, kind, **({"inputs": data} if data else {}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", HALF)
@pytest.mark.parametrize(("path", "name"), PLAIN)
def test_rows_of_long_sequences_are_as_exact_as_those_of_torch(
    path: Path, name: str, kind: torch.dtype
) -> None:
    spec, n = loaded(path, name), 16_384
    if spec.inputs or spec.program.grid or "topk" in name or name == "moba":
        pytest.skip("its pairs are not those of positions alone, or its length is its own")
    heads = spec.program.heads or 1
    q, k, v, _ = tensors(heads, n, kind)
    out = spec.compile()(q, k, v)
    at = torch.arange(3, n, 97)
    for head in range(heads):
        relation = spec.relation(n, 0, head)
        held = evaluate_pairs(relation, at.numpy()[:, None], np.arange(n)[None], n)
        mask = torch.from_numpy(np.broadcast_to(held, (len(at), n)).copy())
        some = mask.any(-1)
        parts = q[:, head, at[some]], k[:, head], v[:, head]
        true, own = (
            scaled_dot_product_attention(a, b, c, attn_mask=mask[some])
            for a, b, c in ([x.double() for x in parts], parts)
        )
        assert worst(out[:, head, at[some]], true) <= 2 * worst(own, true), head
