"""A few queries at the end of many positions: what the kernel computes, and when it is chosen."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from attention_checks import (
    ALONG,
    GRAPHS,
    assert_agree,
    check_transforms,
    defined,
    module_of,
    spec_of,
    tensors,
    with_gradients,
)

from attnspec.backends.planner import candidates, choose, plan
from attnspec.graphs.patterns.window import Window
from attnspec.limits import LIMITS
from attnspec.lower.work import BackendError, Work


def assert_all_ways(
    module: torch.nn.Module,
    given: tuple[torch.Tensor, ...],
    exact: list[torch.Tensor],
    **options: object,
) -> None:
    """With gradients and without them, where another operation computes the same."""
    found = with_gradients(module(*given, **options), given)
    assert_agree(found, exact, exact)
    with torch.no_grad():
        fused = module(*given, **options)
    torch.testing.assert_close(fused, exact[0], rtol=0, atol=1e-12)


def test_inputs_of_narrow_graphs_read_few_keys() -> None:
    body = "input doc: ids causal attend window(before = 9, after = 0) & same(doc)"
    spec, module = spec_of(body), module_of(body)
    doc = torch.arange(200)[None] // 7
    given = tensors(1, 2, 1, 200)
    exact = with_gradients(defined(spec, *given, inputs=[{"doc": doc[0].numpy()}]), given)
    assert_all_ways(module, given, exact, inputs={"doc": doc})
    ((step, _),) = module.engine.binder.works(0, 1, 1, 200)
    assert choose(step, "cpu").steps(step) == ("10 of 200 keys",)


def test_dropout_keeps_the_mean_and_follows_the_seed() -> None:
    module = module_of("attend window(radius = 400)")
    q, k, v = (x.detach() for x in tensors(8, 4, 1, 600, dtype=torch.float32))
    for graded in (False, True):
        q.requires_grad_(graded)
        kept = module(q, k, torch.ones_like(v))
        torch.manual_seed(3)
        dropped = module(q, k, torch.ones_like(v), dropout_p=0.25)
        assert abs(dropped.mean() - kept.mean()) < 0.03
        assert 0.005 < (dropped - kept).std() < 0.5
        torch.manual_seed(3)
        assert torch.equal(module(q, k, torch.ones_like(v), dropout_p=0.25), dropped)
        assert not module(q, k, v, dropout_p=1.0).any()


# --- transforms -------------------------------------------------------------


@pytest.mark.parametrize("name", ["window", "random", "strided"])
def test_derivatives_of_derivatives(name: str) -> None:
    module = module_of(GRAPHS[name])
    for n_q in (1, 2):
        given = tensors(1, 1, n_q, 6, size=2)
        assert torch.autograd.gradcheck(module, given, **ALONG)
        assert torch.autograd.gradgradcheck(module, given, **ALONG)


# torch scripts the derivatives of its own operators when jvp is first used
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["causal", "strided", "blocks", "random"])
def test_transforms_of_torch_func(name: str) -> None:
    module = module_of(GRAPHS[name])
    q, k, v = (x.detach() for x in tensors(3, 2, 2, 40))
    check_transforms(module, q, k, v)


def test_modes_of_the_caller_do_not_reach_the_next_step() -> None:
    given = tensors(1, 2, 1, 70, dtype=torch.float32)
    for body in (GRAPHS["random"], "causal attend window(radius = 9) score alibi()"):
        wanted = module_of(body)(*given)
        for enter in (torch.inference_mode(), torch.device("meta"), torch.no_grad()):
            module = module_of(body)
            with enter:
                module(*given)
            grads = torch.autograd.grad(module(*given).sum(), given)
            assert all(grad.device.type == "cpu" for grad in grads)
            torch.testing.assert_close(module(*given), wanted)


# --- when it is chosen ---------------------------------------------------------------------------


def test_few_queries_are_chosen_and_many_refused() -> None:
    window = Window(radius=9)
    for n_q, n_k in (
        (1, 4096),
        (LIMITS.rows_looked_up, 4096),
        (LIMITS.rows_looked_up, LIMITS.rows_looked_up),
        (1, 1),
    ):
        work = Work(window, n_q, n_k)
        assert choose(work, "cpu").name == "rows"
        ranked = candidates(work, "cpu")
        assert ranked[0].backend.name == "rows"
        seconds = [each.seconds for each in ranked if each.seconds is not None]
        assert seconds == sorted(seconds)
    assert choose(Work(window, LIMITS.rows_looked_up + 1, 4096), "cpu").name != "rows"
    refusal = {c.backend.name: c.refusal for c in candidates(Work(window, 17, 99), "cpu")}["rows"]
    assert refusal == "it takes the last 16 queries at most, the steps of generation"
    with pytest.raises(BackendError, match="rows refuses: it takes the last 16 queries at most"):
        module_of(GRAPHS["window"], "rows")(*tensors(1, 1, 17, 17))
    with pytest.raises(BackendError, match="rows refuses"):
        plan(spec_of(GRAPHS["window"]).program, 64, backend="rows")


def test_copies_compute_the_same() -> None:
    module = module_of(GRAPHS["strided"])
    given = tensors(1, 2, 1, 70, dtype=torch.float32)
    out = module(*given)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*given), out)


@pytest.mark.parametrize(
    ("body", "n_q", "n"),
    [
        ("causal attend (window(before = 4, after = 0) - self) & same(d)", 1, 1),
        ("attend where(q > 9) & same(d)", 1, 4),
        ("attend where(q > 9) & same(d) score alibi()", 3, 4),
        ("attend where(q > 9) & same(d) normalize relu", 4, 4),
    ],
)
def test_what_is_static_may_leave_no_key(body: str, n_q: int, n: int) -> None:
    spec, module = spec_of(f"input d: ids {body}"), module_of(f"input d: ids {body}")
    inputs = {"d": torch.arange(2 * n).view(2, n) % 2}
    given = tensors(2, 4, n_q, n, key_heads=2)
    ones = [{name: x[i].numpy() for name, x in inputs.items()} for i in range(2)]
    exact = with_gradients(defined(spec, *given, inputs=ones), given)
    assert not any(x.any() for x in exact)
    for padding in (None, torch.zeros(2, n, dtype=torch.bool)):
        assert_all_ways(module, given, exact, inputs=inputs, key_padding_mask=padding)
