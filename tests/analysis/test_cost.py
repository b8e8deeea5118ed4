"""Costs against torch's own counter and allocator, and what follows from what."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from population import spec_of
from sweeps import checkered
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from attnspec import Report, parse
from attnspec.ir.mechanisms import MECHANISMS as DECLARED

BODIES = {
    "full": "attend full",
    "strided": "attend strided(stride = 64)",
    "global": "attend window(radius = 128) | global(first(16))",
    "random": "attend random(keys = 16, seed = 0) | self",
    "alibi": "attend window(radius = 64) score alibi()",
    "two graphs": "head 0 { attend window(radius = 64) } head 1 { attend residue(step = 32) }",
}

MECHANISMS = [
    "attend linear()",
    "causal attend linear()",
    "causal attend taylor()",
    "attend taylor(order = 2)",
    "causal attend favor(features = 64)",
    "causal attend rfa(features = 32)",
    "attend linformer(rank = 64, max_length = 256)",
    "attend linformer(rank = 64, projection = conv, max_length = 256)",
    "attend nystrom(landmarks = 32, conv = 5)",
    "attend synthesizer(max_length = 256)",
    "attend synthesizer(max_length = 256, kind = random, products = true)",
    "attend mixer(hidden = 64, max_length = 256)",
    "attend gmlp(max_length = 256)",
    "attend fourier()",
    "causal attend window(before = 31, after = 0) + linear()",
    "causal attend window(before = 31, after = 0) + favor(features = 64)",
    "attend (window(radius = 16) | global(first(4))) + favor(features = 64)",
    "causal attend (window(before = 63, after = 0) | residue(step = 16)) + taylor()",
    "causal head 0 { attend window(radius = 32) + linear() } head 1 { attend window(radius = 64) }",
    "head 0 { attend favor(features = 64) } head 1 { attend full }",
]


def report_of(body: str, n: int, head_dim: int = 64) -> Report:
    return spec_of(f"heads 2 {body}").analyse(n, head_dim=head_dim)


def tensors(n: int, size: int = 64) -> list[Tensor]:
    return [torch.randn(1, 2, n, size, requires_grad=True) for _ in range(3)]


def _forward(q: list[int], k: list[int], v: list[int], *rest: object, **more: object) -> int:
    return 2 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])


def _backward(
    grad: list[int], q: list[int], k: list[int], v: list[int], *_: object, **__: object
) -> int:
    return q[0] * q[1] * q[2] * k[2] * (6 * q[3] + 4 * v[3])


FLASH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward,
}
"""torch counts these operations on other devices, but not on the CPU."""


def counted(run: Callable[[], object]) -> int:
    with FlopCounterMode(display=False, custom_mapping=FLASH) as counter:
        run()
    return int(counter.get_total_flops())


def allocated(run: Callable[[], object]) -> int:
    """The most bytes that were allocated at one time."""
    # what other tests left behind is not freed meanwhile
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            kept = run()
    finally:
        gc.enable()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    del kept
    return int(np.cumsum([change for _, change in changes]).max())


@pytest.mark.parametrize(("n", "name"), checkered([100, 1024], BODIES))
def test_operations_and_memory_are_about_those_of_torch(name: str, n: int) -> None:
    report, spec = report_of(BODIES[name], n), spec_of(f"heads 2 {BODIES[name]}")
    module, (q, k, v) = spec.compile(), tensors(n)
    with torch.no_grad():
        forward = counted(lambda: module(q, k, v))
        measured = allocated(lambda: module(q, k, v))
    assert report.peak_memory is not None
    estimate = report.peak_memory - 3 * 2 * n * 64 * 4
    assert measured / 2 <= estimate <= measured * 2
    assert report.flops is not None
    assert report.backward_flops is not None
    by_edges = [step.chosen.name == "edges" for step in spec.plan(n).steps]
    if any(by_edges):
        # torch does not count products on edges
        if not all(by_edges):
            assert report.useful_flops is not None
            assert report.useful_flops <= report.flops <= report.backward_flops
            return
        edges = spec.mask(n).sum() + spec.mask(n, 0, 1).sum()
        assert report.flops == report.useful_flops == 4 * 64 * edges
        assert report.backward_flops == 8 * 64 * edges
        return
    # tiles that the cover leaves undecided may be empty, and those at the ends of a sequence are
    # computed with their neighbours
    assert forward / 1.05 <= report.flops <= 1.05 * forward
    out = module(q, k, v)
    backward = counted(lambda: out.sum().backward())
    assert backward / 1.05 <= report.backward_flops <= 1.05 * backward


@pytest.mark.parametrize("body", MECHANISMS)
def test_operations_and_memory_of_mechanisms_are_about_those_of_torch(body: str) -> None:
    n, size = 256, 64
    report, module = report_of(body, n), spec_of(f"heads 2 {body}").compile()
    q, k, v = tensors(n, size)
    # weights that are alike: what the graph takes from a kernel's sums is then no more than is left
    alike = (q.detach() / 8).requires_grad_(), k, v
    with torch.no_grad():
        forward = counted(lambda: module(*alike))
        measured = allocated(lambda: module(q, k, v))
    assert report.peak_memory is not None
    # the features of a single head are priced somewhat high
    factor = 2.5 if body.endswith("head 1 { attend full }") else 2
    estimate = report.peak_memory - 3 * 2 * n * size * 4
    assert measured / factor <= estimate <= measured * factor
    for name in ("flops", "backward_flops", "bytes", "peak_memory", "intensity"):
        assert report.quality[name] == "estimate"
    assert report.bytes is not None
    assert report.flops is not None
    assert report.intensity == report.flops / report.bytes
    # q, k, v are read and the output is written, whatever comes between
    assert min(report.bytes, report.peak_memory) >= 4 * 2 * n * size * 4
    assert report.useful_flops is None
    if "conv = " in body or "projection = conv" in body or "fourier" in body:
        # torch counts a convolution of each channel as one of all, and of a transform nothing
        return
    assert forward == pytest.approx(report.flops, rel=0.15)
    out = module(*alike)
    backward = counted(lambda: out.sum().backward())
    assert backward == pytest.approx(report.backward_flops, rel=0.15)


def test_operations_of_mechanisms_by_their_formulas() -> None:
    n, d = 128, 32
    expected = {
        "linear()": 4 * n * d * d,
        "taylor()": 4 * n * (d + 1) * d,
        "favor(features = 16)": 4 * n * 16 * d + 4 * n * 16 * d,
        "rfa(features = 8)": 4 * n * 8 * d + 4 * n * 16 * d,
        "linformer(rank = 10)": 8 * n * 10 * d,
        "linformer(rank = 10, projection = mean)": 4 * n * 10 * d,
        "synthesizer(max_length = 128, kind = random)": 2 * n * n * d,
        "mixer(hidden = 20, max_length = 128)": 4 * n * 20 * d,
        "fourier()": 5 * n * d * (7 + 5),
    }
    for text, flops in expected.items():
        assert spec_of(f"attend {text}").analyse(n, head_dim=d).flops == flops, text
    # q, k, v and the output, features twice and the sums: written, and read
    report = spec_of("layers 2 heads 4 attend linear()").analyse(100)
    assert report.bytes == 4 * 4 * (4 * 6400 + 2 * (2 * 6400 + 64 * 65))


@pytest.mark.parametrize("declared", DECLARED, ids=lambda declared: declared.name)
def test_operations_of_a_mechanism_grow_as_its_order_says(declared: type) -> None:
    n = 1 << 20
    needs = {"mixer": f"hidden = 16, max_length = {4 * n}", "gmlp": f"max_length = {4 * n}"}
    needs["synthesizer"] = needs["linformer"] = needs["gmlp"]
    spec = spec_of(f"attend {declared.name}({needs.get(declared.name, '')})")  # type: ignore[attr-defined]
    few, many = (spec.analyse(length) for length in (n, 4 * n))
    times = {"n": 4, "n**2": 16, "n * log2(n)": 4 * 22 / 20}[str(few.order)]
    assert few.flops is not None
    assert many.flops is not None
    assert many.flops / few.flops == pytest.approx(times, rel=0.03)


def test_choices_cost_what_they_take_at_most() -> None:
    n, size = 4096, 64
    taken = {
        "attend topk(keys = 3)": 3 * n,
        "causal attend topk(blocks = 2, size = 64)": sum(min(q + 1, 128) for q in range(n)),
    }
    for body, pairs in taken.items():
        found = spec_of(body).analyse(n).to_dict(("flops", "bytes"))["figures"]
        assert found["flops"]["value"] == 4 * size * pairs
        assert (found["flops"]["quality"], found["bytes"]["quality"]) == ("bound", "estimate")
        # queries and outputs, and the keys and values of a tile of 64 for each 64 pairs
        assert found["bytes"]["value"] == 4 * size * 2 * (n + pairs // 64)


def test_costs_of_more_samples_and_heads() -> None:
    spec = spec_of("attend window(radius = 200)")
    one, narrow = spec.analyse(2048), spec.analyse(2048, head_dim=32)
    many = spec.analyse(2048, batch=3, heads=4)
    assert many.flops == 12 * (one.flops or 0) == 24 * (narrow.flops or 0)
    assert (one.peak_memory or 0) * 6 < (many.peak_memory or 0) <= (one.peak_memory or 0) * 12
    declared = spec_of("heads 4 attend window(radius = 200)")
    with pytest.raises(ValueError, match="declares heads 4, got heads = 2"):
        declared.analyse(2048, heads=2)
    with pytest.raises(ValueError, match="`batch` must be an integer from 1 to"):
        spec.analyse(2048, batch=0)


def test_costs_of_all_pairs_are_those_of_the_definition() -> None:
    report = report_of("attend full", 32, head_dim=16)
    assert report.flops == report.useful_flops == 2 * 4 * 16 * 32 * 32
    # a flash kernel computes scores again
    assert report.backward_flops == 2.5 * report.flops
    unknown = report_of("input m: tokens attend window(radius = 2) | global(m)", 40)
    assert (unknown.useful_flops, unknown.flops) == (None, 2 * 4 * 64 * 40 * 40)


def test_layers_and_heads_that_differ_add_up() -> None:
    n, names = 512, ("flops", "backward_flops", "bytes")
    both = report_of("head 0 { attend linear() } head 1 { attend nystrom(landmarks = 16) }", n)
    one, other = (report_of(f"attend {x}", n) for x in ("linear()", "nystrom(landmarks = 16)"))
    for name in names:
        assert 2 * getattr(both, name) == getattr(one, name) + getattr(other, name)
    # the most expensive layer counts
    text = "layers 3 layer 0, 2 { attend window(radius = 1) } layer 1 { attend full }"
    assert report_of(text, n).flops == report_of("attend full", n).flops


def test_a_plan_is_for_all_samples_and_heads() -> None:
    spec = spec_of("attend window(radius = 40)")
    one = spec.plan(512, "cpu", 1, None, 64).steps[0].candidates
    many = spec.plan(512, "cpu", 8, 12, 32).steps[0].candidates
    at = {each.backend.name: each.seconds or 0.0 for each in one}
    for each in many:
        # calls are shared, pairs are not
        assert (each.seconds or 0.0) <= at[each.backend.name] * 48 * (1 + 1e-9)


def test_lengths_that_have_no_cost() -> None:
    assert spec_of("attend full").analyse(1 << 30).flops is None
    assert spec_of("attend gmlp(max_length = 64)").analyse(65).flops is None
    empty = report_of("attend linear()", 0)
    assert (empty.bytes, empty.peak_memory) == (0, 0)


def test_break_even() -> None:
    bodies = ("window(radius = 16)", "window(radius = 256)", "linear()", "favor()")
    near, wide, linear, favor = (report_of(f"attend {body}", 9).break_even or 0 for body in bodies)
    assert 1 <= near <= 4096
    assert wide > near
    # four times the features of a head of size 64
    assert 0 < 2 * linear < favor < 8192


def test_figures_from_a_sample_of_tiles_are_estimates() -> None:
    spec = spec_of("attend window(radius = 256) | global(first(64))")
    for length, quality in ((4096, "bound"), (1 << 17, "bound"), (1 << 20, "estimate")):
        report = spec.analyse(length)
        assert report.quality["flops"] == report.quality["backward_flops"] == quality
        assert report.quality["useful_flops"] == "exact"
    for body in ("attend full", "attend block(size = 64)", BODIES["random"]):
        # what is counted whole is exact
        assert report_of(body, 1024).quality["flops"] == "exact"


@pytest.mark.parametrize(
    ("body", "rule", "largest"),
    [
        ("attend full", "every key stays to the end", 512),
        ("attend window(before = 31, after = 0)", "a key can go 31 steps after it was written", 32),
        (
            "attend window(before = 31, after = 0) | columns(first(4))",
            "keys 0 to 3 stay to the end; any other key can go 31 steps after it was written",
            36,
        ),
        ("attend block(size = 64)", "a key can go at the end of its block of 64", 64),
        ("attend residue(step = 32)", "every key stays until the last 32 queries", 481),
        (
            "attend summary(stride = 64, cells = 1)",
            "504 keys from 0 to 510 are never needed; every other key stays to the end",
            8,
        ),
        ("attend powers", "a key can go 256 steps after it was written", 257),
    ],
)
def test_rules_of_eviction(body: str, rule: str, largest: int) -> None:
    report = parse(f"attention a {{ causal {body} }}").analyse(512)
    assert (report.eviction, report.kv_cache) == (rule, largest)
