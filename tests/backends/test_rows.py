"""A few queries at the end of many positions: what the kernel computes, and when it is chosen."""

from __future__ import annotations

import copy
import math
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
from test_backends import SCORES, changed_scores, formula

from attnspec.backends.planner import candidates, choose, plan
from attnspec.graphs.patterns.window import Window
from attnspec.limits import LIMITS
from attnspec.lower.work import BackendError, Work
from attnspec.verification import verify

SHAPES = (
    (1, 1),
    (1, 2),
    (1, 130),
    (2, 130),
    (LIMITS.rows_looked_up, 130),
    (LIMITS.rows_looked_up, LIMITS.rows_looked_up),
    (1, 257),
    (5, 64),
)

INPUTS = (
    "input important: tokens(at_most = 9) input doc: ids input size: length"
    " attend (window(radius = 30) | global(important | first(1))) & same(doc) | prefix(size)"
)


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


@pytest.mark.parametrize("name", GRAPHS)
def test_values_and_gradients(name: str) -> None:
    spec, module = spec_of(GRAPHS[name]), module_of(GRAPHS[name], "rows")
    for n_q, n_k in SHAPES:
        given = tensors(2, 2, n_q, n_k, out_size=5)
        exact = with_gradients(defined(spec, *given), given)
        assert_all_ways(module, given, exact)
        if n_k == 130:
            short = [x.detach().float().requires_grad_() for x in given]
            base = with_gradients(defined(spec, *short), short)
            assert_agree(with_gradients(module(*short), short), exact, base)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype) -> None:
    spec, module = spec_of(GRAPHS["strided"]), module_of(GRAPHS["strided"])
    dense = module_of(GRAPHS["strided"], "dense")
    for n_q in (1, 4):
        given = tensors(1, 4, n_q, 200, key_heads=2)
        short = [x.detach().to(dtype).requires_grad_() for x in given]
        wide = [x.detach().double().requires_grad_() for x in short]
        exact = with_gradients(defined(spec, *wide), wide)
        base = with_gradients(dense(*short), short)
        found = with_gradients(module(*short), short)
        assert all(x.dtype == dtype for x in found)
        assert_agree(found, exact, base)
        with torch.no_grad():
            fused = module(*short)
        assert fused.dtype == dtype
        assert_agree([fused, *found[1:]], exact, base)


@pytest.mark.parametrize("name", ["causal", "window", "strided", "random", "where"])
def test_grouped_queries_and_padding(name: str) -> None:
    spec, module = spec_of(GRAPHS[name]), module_of(GRAPHS[name])
    padding = torch.ones(4, 130, dtype=torch.bool)
    padding[1, 90:] = False
    padding[2, :50] = False
    padding[3] = False
    for heads, key_heads in ((2, 2), (6, 2), (3, 1)):
        for n_q in (1, 3):
            given = tensors(4, heads, n_q, 130, key_heads=key_heads)
            exact = with_gradients(defined(spec, *given), given)
            assert_all_ways(module, given, exact)
            exact = with_gradients(defined(spec, *given, padding=padding), given)
            assert_all_ways(module, given, exact, key_padding_mask=padding)
            with torch.no_grad():
                assert not module(*given, key_padding_mask=padding)[3].any()


@pytest.mark.parametrize("key_heads", [6, 3, 2, 1])
def test_heads_that_differ(key_heads: int) -> None:
    body = "heads 6 attend window(radius = 9) head odd { attend residue(step = 5) }"
    for more in ("", " head 4 { attend full }", " head 0, 2 { attend self }"):
        spec, module = spec_of(body + more), module_of(body + more)
        for n_q in (1, 4, 40):
            given = tensors(1, 6, n_q, 70, key_heads=key_heads)
            assert_all_ways(module, given, with_gradients(defined(spec, *given), given))


@pytest.mark.parametrize("normalize", ["softmax", "softmax1", "relu", "sigmoid"])
@pytest.mark.parametrize("name", SCORES)
def test_scores_and_normalisers(name: str, normalize: str) -> None:
    body = f"heads 4 attend window(radius = 20) | global(first(2)) {SCORES[name]}"
    body += f" normalize {normalize}"
    spec, module = spec_of(body), module_of(body)
    n, table = 130, None
    if name == "bias":
        (table,) = module.parameters()
        torch.nn.init.normal_(table)
    for n_q in (1, 7):
        q, k, v = tensors(2, 4, n, n, key_heads=2)
        given = q.detach()[:, :, n - n_q :].requires_grad_(), k, v
        wide = torch.cat([q.detach()[:, :, : n - n_q], given[0]], 2)
        keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
        scale = 1 / (2 + n) if name == "scale" else 1 / math.sqrt(8)
        scores = changed_scores(wide @ keys.transpose(2, 3) * scale, name, table)
        held = torch.from_numpy(spec.mask(n))
        rows = (formula(normalize)(scores, held) @ values)[:, :, n - n_q :]
        exact = with_gradients(rows, given)
        assert_all_ways(module, given, exact)


@pytest.mark.parametrize("n_q", [1, 9])
def test_inputs_decide_the_pairs(n_q: int) -> None:
    spec, module = spec_of(INPUTS), module_of(INPUTS)
    given, at = tensors(3, 2, n_q, 60), torch.arange(60)
    inputs = {
        "important": at[None] % 11 == torch.arange(3)[:, None],
        "doc": at.expand(3, 60) // 25,
        "size": torch.arange(3) * 2,
    }
    ones = [{name: x[i].numpy() for name, x in inputs.items()} for i in range(3)]
    exact = with_gradients(defined(spec, *given, inputs=ones), given)
    assert_all_ways(module, given, exact, inputs=inputs)
    padding = torch.ones(3, 60, dtype=torch.bool)
    padding[1, 50:] = False
    exact = with_gradients(defined(spec, *given, inputs=ones, padding=padding), given)
    assert_all_ways(module, given, exact, inputs=inputs, key_padding_mask=padding)


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


def test_tensors_of_any_strides() -> None:
    spec, module = spec_of(GRAPHS["strided"]), module_of(GRAPHS["strided"])
    shared = torch.randn(2, 70, 3, 4, 8, dtype=torch.float64)
    before = shared.clone()
    for q, k, v in (
        [shared[:, :, i].transpose(1, 2) for i in range(3)],
        [shared[:, ::2, 0].transpose(1, 2).flip(2)] * 3,
        [torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(2, 4, 35, 8)] * 3,
        [torch.randn(2, 4, 8, 35, dtype=torch.float64).transpose(2, 3)] * 3,
    ):
        given = q[:, :, -3:].detach(), k.detach(), v.detach()
        leaves = tuple(x.requires_grad_() for x in given)
        exact = with_gradients(defined(spec, *leaves), leaves)
        assert_all_ways(module, leaves, exact)
    assert torch.equal(shared, before)


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


@pytest.mark.parametrize("name", ["strided", "blocks", "random"])
def test_emitted_modules_take_steps_too(name: str) -> None:
    spec = spec_of(GRAPHS[name])
    space: dict[str, type[torch.nn.Module]] = {}
    exec(spec.emit(), space)
    module, twin = space["Sample"](), spec.compile()
    for n_q, n in ((1, 70), (1, 71), (4, 75), (40, 80)):
        given = tensors(1, 2, n_q, n, dtype=torch.float32)
        assert torch.equal(module(*given), twin(*given))
        with torch.no_grad():
            assert torch.equal(module(*given), twin(*given))


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


def test_a_named_backend_takes_steps_itself() -> None:
    for backend in ("dense", "tiles", "bands", "scattered"):
        spec, module = spec_of(GRAPHS["strided"]), module_of(GRAPHS["strided"], backend)
        for n in (70, 71):
            given = tensors(1, 2, 1, n)
            exact = with_gradients(defined(spec, *given), given)
            assert_agree(with_gradients(module(*given), given), exact, exact)
        assert len(module.engine.steps) == 2
        assert len(module.engine.prepared) == 0


@pytest.mark.parametrize("n", [1, 2, 7, LIMITS.rows_looked_up])
def test_short_sequences_are_verified(n: int) -> None:
    for name in ("strided", "blocks", "random", "where", "nothing"):
        found = verify(spec_of(GRAPHS[name]).program, n, backend="rows")
        assert found.ok, str(found)
    wrong = module_of("attend window(radius = 1)", "rows")
    if n > 2:
        assert not verify(spec_of("attend window(radius = 2)").program, n, module=wrong).ok


def test_copies_compute_the_same() -> None:
    module = module_of(GRAPHS["strided"])
    given = tensors(1, 2, 1, 70, dtype=torch.float32)
    out = module(*given)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(*given), out)


@pytest.mark.parametrize("body", ["attend full", "causal attend full", "attend columns(first(40))"])
def test_padding_alone_is_the_mask_of_all_rows(body: str) -> None:
    spec, module = spec_of(body), module_of(body)
    padding = torch.ones(2, 33, dtype=torch.bool)
    padding[0, :4] = padding[1, 30:] = False
    for heads, key_heads in ((4, 2), (3, 1), (2, 2)):
        for n_q in (1, 2, 5, LIMITS.rows_looked_up):
            given = tensors(2, heads, n_q, 33, key_heads=key_heads)
            exact = with_gradients(defined(spec, *given, padding=padding), given)
            assert_all_ways(module, given, exact, key_padding_mask=padding)


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
