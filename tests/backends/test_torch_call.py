"""Torch's own call: padding that cuts it to ranges of keys, and the masks that are kept."""

from __future__ import annotations

import gc

import pytest
import torch
from attention_checks import module_of, spec_of, tensors, with_gradients
from limited import REFUSING

from attnspec.backends.torch_call import forms, kernel
from attnspec.backends.torch_call.backend import TorchCall
from attnspec.lower.work import Work
from attnspec.runtime import CompiledAttention

BODIES = {
    "full": "attend full",
    "causal": "causal attend full",
    "window": "attend window(radius = 5)",
    "alibi": "causal attend full score alibi()",
    "alibi twice": "causal attend full score alibi() score alibi()",
    "softmax1": "causal attend full normalize softmax1",
}


def kernel_of(module: CompiledAttention, heads: int, n: int) -> kernel.TorchCallKernel:
    (group,) = module.engine.prepare(0, heads, heads, n, n, "cpu").groups
    assert isinstance(group.kernel, kernel.TorchCallKernel)
    return group.kernel


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.limits("", "tiny")
def test_padding_cuts_calls(name: str, holes: bool) -> None:
    module, same = module_of(BODIES[name], "torch"), module_of(BODIES[name], "dense")
    for n_q, n in ((1, 1), (33, 33), (20, 33)):
        given = tensors(5, 4, n_q, n, key_heads=2, out_size=5)
        padding = torch.ones(5, n, dtype=torch.bool)
        padding[1, 20:] = False
        padding[2, : n // 2] = False
        padding[3] = False
        if holes:
            padding[4, 3:9] = False
        cut = kernel._ranges(padding)
        assert (cut is None) == (holes and n > 3)
        meant = same(*given, key_padding_mask=padding, return_lse=True)
        found = module(*given, key_padding_mask=padding, return_lse=True)
        torch.testing.assert_close(found, meant, rtol=0, atol=1e-12)
        finite = meant[1] > -torch.inf
        joined = [
            torch.cat([out, lse.where(finite, 0)[..., None]], -1) for out, lse in (found, meant)
        ]
        for mine, right in zip(*(with_gradients(x, given) for x in joined), strict=True):
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-12)


def test_equal_samples_share_a_call_and_every_other_has_its_own() -> None:
    padding = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
    assert kernel._ranges(padding) == [
        (slice(0, 2), slice(0, 2)),
        (slice(2, 3), slice(1, 3)),
        (slice(3, 4), slice(0, 0)),
    ]


def test_layers_share_a_mask() -> None:
    modules = [module_of("attend window(radius = 5)", "torch") for _ in range(2)]
    masks = [kernel_of(m, 2, n)._bias(torch.float32).added for m in modules for n in (40, 41)]
    # those of other lengths are parts of it
    assert len({mask.untyped_storage().data_ptr() for mask in masks}) == 1


@pytest.mark.parametrize(
    "graph", ["full", "causal", "window(radius = 3)", "window(before = 40, after = 0)", "self"]
)
def test_the_first_positions_have_the_form_of_their_own_pairs(graph: str) -> None:
    longest = 9
    whole = Work(spec_of(f"attend {graph}").relation(longest), longest, longest)
    for n in range(1, longest + 1):
        meant = forms.form_of(Work(spec_of(f"attend {graph}").relation(n), n, n))
        assert forms.form_below(whole, n) is meant, n


def work_of(body: str, n: int) -> Work:
    ((work, _),) = module_of(body).engine.binder.works(0, 1, n, n)
    return work


def refusal(body: str, n: int) -> str | None:
    return TorchCall().refuses(work_of(body, n), "cpu")


def test_what_a_call_takes() -> None:
    for body in BODIES.values():
        pairs = 21 * 21 // (2 if "causal" in body else 1)
        masked = pairs if "window" in body else 0
        if "alibi" in body:
            # what is added to scores is a mask of all pairs
            pairs = masked = 21 * 21 // 2
        found = TorchCall().amounts(work_of(body, 21))
        assert found == {"torch_call": 1, "torch_pair": pairs, "torch_masked": masked}, body


def test_heads_are_one_call_whose_pairs_are_known_before() -> None:
    call = TorchCall()
    for body, joins in {
        "attend window(radius = 3)": True,
        "attend full": True,
        "attend topk(keys = 2)": False,
        "input t: tokens attend global(t)": False,
        "attend full score alibi()": False,
    }.items():
        works = [work_of(body, 9), work_of(body, 9)]
        assert call.joins(works) == joins, body
    assert not call.joins([work_of("attend full", 9), work_of("attend full scale 2.0", 9)])


@pytest.mark.limits(REFUSING)
def test_what_needs_a_larger_mask_than_is_kept_is_refused() -> None:
    for body in BODIES.values():
        is_mask = "window" in body or "alibi" in body
        assert refusal(body, 40) is None, body
        assert refusal(body, 41) == (
            "a mask of at most 1,600 pairs is kept, and there are 1,681" if is_mask else None
        ), body


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("attend topk(keys = 3) & causal score alibi()", None),
        ("attend full normalize sigmoid", "torch knows no `sigmoid`"),
        ("attend full score alibi() score softcap(cap = 2)", "and `softcap` is none"),
        ("heads 1 attend full score bias(buckets = 4)", "and `bias` is none"),
        ("attend lsh(rounds = 1, share_qk = true)", "not at unit length"),
        ("attend lsh(share_qk = false, multiplicity = true)", "`lsh` changes more than pairs"),
        ("attend sinkhorn(size = 4)", "`sinkhorn` changes more than pairs"),
        ("attend cluster(count = 2, of = q)", "`cluster` changes more than pairs"),
    ],
)
def test_what_torch_cannot_say_is_refused(body: str, reason: str | None) -> None:
    found = refusal(body, 8)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("normalize", ["softmax", "softmax1"])
@pytest.mark.parametrize("scale", ["0", "-1.5", "1e-30"])
def test_causal_scores_of_any_scale_are_numbers(scale: str, normalize: str) -> None:
    body = f"causal attend full scale {scale} normalize {normalize}"
    padding = torch.arange(70) < torch.tensor([[40], [70]])
    for real in (None, padding):
        found = []
        for name in ("torch", "dense"):
            q, k, v = torch.linspace(-1, 1, 3 * 2 * 70 * 4).cos().view(3, 2, 1, 70, 4).unbind(0)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = module_of(body, name)(*leaves, key_padding_mask=real)
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        torch.testing.assert_close(*found)


def bytes_alive() -> int:
    """The bytes of all tensors that live, each storage once."""
    gc.collect()
    tensors = (x for x in gc.get_objects() if type(x) is torch.Tensor)
    # what a transform wrapped, kept by the error of another test, has no storage
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    storages = (x.untyped_storage() for x in tensors if not wrapped(x))
    return sum({x.data_ptr(): x.nbytes() for x in storages}.values())


def test_masks_go_with_their_modules() -> None:
    before = bytes_alive()
    module = module_of("attend window(radius = 5)", "torch")
    padding = torch.arange(500) < torch.tensor([[400], [500]])
    module(*torch.zeros(3, 2, 1, 500, 4).unbind(0))
    module(*torch.zeros(3, 2, 1, 500, 4).unbind(0), key_padding_mask=padding)
    assert bytes_alive() > before + 3 * 4 * 500**2
    del module
    assert bytes_alive() < before + 500**2


def test_masks_of_many_paddings_are_bounded() -> None:
    module, before = module_of("attend window(radius = 5)", "torch"), bytes_alive()
    for batch in range(1, 60):
        padding = torch.arange(40).expand(batch, -1) >= batch % 40
        module(*torch.zeros(3, batch, 1, 40, 4).unbind(0), key_padding_mask=padding)
    # the last 32, of 28 to 59 samples, and the one without padding
    assert bytes_alive() < before + 2 * 4 * 40**2 * sum(range(28, 61))
