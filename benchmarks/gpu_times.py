"""What is timed on a device, beside the best that others offer there: the targets G1 to G7.

A row that could not be measured says why. Times are medians of turns in one process; of a backward,
what a call with gradients takes beyond one without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from attnspec.backends.planner import AUTO
from attnspec.bench.timing import alternate
from attnspec.layout.axes import axis
from attnspec.layout.steps import bands_of, layouts_of
from attnspec.layout.tile_layout import StepLayout
from attnspec.runtime import CompiledAttention
from attnspec.spec import Spec, parse
from attnspec.verification import error_bound
from benchmarks.cases import CASES, SHAPE_PATTERNS, Shape
from benchmarks.masks import predicate
from benchmarks.measuring import Json
from benchmarks.shapes import called, padding_of, torch_call

Attention = Callable[..., torch.Tensor]

RowOf = Callable[[], dict[str, Json]]

FORWARD, TRAINING = "forward", "training"

TARGETS: Mapping[str, str] = {
    "G0": "static graphs and those of inputs: no step of training waits for the device; CUDA graphs"
    " capture one",
    "G1": "beside compiled FlexAttention with the same mask: at least 0.95 times as fast, 8 times"
    " on strided, dilated and fixed",
    "G2": "efficiency against the best dense kernel, forward / backward: at least 0.45 / 0.35 on a"
    " window, 0.35 / 0.25 on strided, dilated and fixed",
    "G3": "causal linear attention, beside flash-linear-attention: never slower",
    "G4": "window and global tokens, a step of training: memory grows with n",
    "G5": "`window(before = 511) \\| chosen`, 16 blocks of 64, 64 : 4 heads of 128: at most 25 ms"
    " forward, 35 ms backward",
    "G6": "laying out a window: at most 50 ms, 64 bytes a tile",
    "G7": "shapes that people use, beside the best call of torch: at least 0.8 times as fast",
}
"""What is aimed at, by the first letters of a row's name."""

STRIDED = ("strided(128)", "causal strided(128)", "dilated(2048, 8)", "fixed(128, 8)")
"""Patterns that FlexAttention in natural order computes many times too much of."""

UNINTERRUPTED = (
    "causal attend window(before = 511, after = 0) | residue(step = 128)",
    "attend window(radius = 256) | global(first(64)) score softcap(cap = 30)",
    "causal input document: ids attend same(document)",
)
"""Specs whose calls leave the host free: pairs are known before, or labels decide them."""

ON_ONE = (("flex", "causal input document: ids attend where(document(q) - document(k) <= 2)"),)
"""More of them, each with the one backend under which it does. Lists that the data decide are as
long as the longest, for which the host waits."""

DOCUMENTS = "documents"

BESIDE_FLEX = (*STRIDED, "window(256)", "causal window(511)", "Longformer 256 + 64", DOCUMENTS)

DENSE_SHARE: Mapping[str, tuple[str, float, float]] = {
    "window(before 1023)": ("attend window(before = 1023, after = 0)", 0.45, 0.35),
    "strided(128)": (CASES["strided(128)"].body, 0.35, 0.25),
    "dilated(2048, 8)": (CASES["dilated(2048, 8)"].body, 0.35, 0.25),
    "fixed(128, 8)": (CASES["fixed(128, 8)"].body, 0.35, 0.25),
}
"""Patterns with the least efficiency that is aimed at, forward and backward."""


@dataclass(frozen=True)
class Settings:
    """Where and how far is timed; `compiled` tells whether FlexAttention is."""

    device: str
    dtype: torch.dtype
    lengths: tuple[int, ...]
    long: int
    longest: int
    shapes: tuple[Shape, ...]
    heads: int
    rounds: int
    compiled: bool = True
    few: bool = False


def timings(settings: Settings) -> Iterator[tuple[str, RowOf]]:
    """Every row under its name, with what measures it."""
    for body in UNINTERRUPTED[:: 2 if settings.few else 1]:
        for backend in ("triton", "flex"):
            yield f"G0, {backend}, {body}", _row(_uninterrupted, settings, body, backend, 0.0)
        title = f"G0, triton with dropout, {body}"
        yield title, _row(_uninterrupted, settings, body, "triton", 0.1)
    for backend, body in ON_ONE:
        yield f"G0, {backend}, {body}", _row(_uninterrupted, settings, body, backend, 0.0)
    yield from _all_beside_flex(settings, settings.lengths[:1])
    for name in list(DENSE_SHARE)[:: 3 if settings.few else 1]:
        yield f"G2, {name}, n = {settings.long:,}", _row(_efficiency, settings, name)
    yield f"G3, causal linear, n = {settings.long:,}", lambda: _linear(settings)
    yield f"G4, window + global, n = {settings.longest:,}", lambda: _longest(settings)
    yield f"G5, window | chosen, n = {settings.long:,}", lambda: _chosen(settings)
    yield f"G6, layouts, n = {settings.longest:,}", lambda: _layouts(settings)
    for shape in settings.shapes:
        for name in list(SHAPE_PATTERNS)[:: 4 if settings.few else 1]:
            for padded in (False, True):
                title = f"G7, {name}, {shape}{', padded' * padded}"
                yield title, _row(_shape, settings, name, shape, padded)
    yield from _all_beside_flex(settings, settings.lengths[1:])


def _all_beside_flex(settings: Settings, lengths: Sequence[int]) -> Iterator[tuple[str, RowOf]]:
    for n in lengths:
        for name in BESIDE_FLEX[:: 7 if settings.few else 1]:
            yield f"G1, {name}, n = {n:,}", _row(_beside_flex, settings, name, n)


def _row(measure: Callable[..., dict[str, Json]], *arguments: object) -> RowOf:
    return lambda: measure(*arguments)


# --- what rows share -----------------------------------------------------------------------------


def _tensors(settings: Settings, heads: int, n: int, size: int = 64, batch: int = 1) -> Any:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, heads, n, size, generator=generator)
    return x.to(settings.device, settings.dtype)


def _three(settings: Settings, n: int) -> list[torch.Tensor]:
    return [_tensors(settings, settings.heads, n) for _ in range(3)]


def _module(spec: Spec, settings: Settings, size: int = 64) -> CompiledAttention:
    return spec.compile(device=settings.device, head_size=size)


def _seconds(
    subjects: Mapping[str, Attention], inputs: Sequence[torch.Tensor], settings: Settings
) -> dict[str, dict[str, float]]:
    """The median seconds of each subject, forward and backward."""
    found: dict[str, dict[str, float]] = {}
    for mode in (FORWARD, TRAINING):
        runs = {name: called(each, inputs, mode) for name, each in subjects.items()}
        waiting = {name: _waiting(run, settings) for name, run in runs.items()}
        found[mode] = {k: t.median for k, t in alternate(waiting, settings.rounds).items()}
    both, forward = found[TRAINING], found[FORWARD]
    backward = {name: max(both[name] - forward[name], 1e-9) for name in both}
    return {"forward": forward, "backward": backward}


def _waiting(run: Callable[[], object], settings: Settings) -> Callable[[], object]:
    """The call and waiting for its end."""

    def waited() -> object:
        found = run()
        _wait(settings)
        return found

    return waited


def _wait(settings: Settings) -> None:
    if settings.device == "cuda":
        torch.cuda.synchronize()


def _judged(
    seconds: Mapping[str, Mapping[str, float]], rival: str, targets: tuple[float, float]
) -> dict[str, Json]:
    """Times, how many times faster than the rival, and whether that is as aimed at."""
    ratios = {mode: found[rival] / found["ours"] for mode, found in seconds.items()}
    wanted = dict(zip(("forward", "backward"), targets, strict=True))
    return {
        "seconds": {mode: dict(found) for mode, found in seconds.items()},
        "ratio": dict(ratios),
        "target": dict(wanted),
        "ok": all(ratios[mode] >= wanted[mode] for mode in wanted),
    }


def _first(call: Callable[[], object], settings: Settings) -> float:
    start = perf_counter()
    call()
    _wait(settings)
    return perf_counter() - start


# --- the rows ------------------------------------------------------------------------------------


def _uninterrupted(
    settings: Settings, body: str, backend: str, dropout_p: float
) -> dict[str, Json]:
    """A step of training never waits for the device and can be captured; what is played back is
    what was computed, and of dropped weights another choice each time."""
    gpu, n = settings.device == "cuda", min(settings.lengths)
    spec = parse(f"attention measured {{ {body} }}")
    module = spec.compile(backend if gpu else AUTO, settings.device, 64).to(settings.dtype)
    parts = [x.requires_grad_() for x in _three(settings, n)]
    ids = torch.arange(n, device=settings.device)[None] // 1000
    inputs = {"document": ids} if spec.program.inputs else None

    def step() -> list[torch.Tensor]:
        out = module(*parts, dropout_p=dropout_p, inputs=inputs)
        return [out, *torch.autograd.grad(out.square().sum(), parts)]

    if not gpu:
        step()
        return {"reason": "there is no GPU to wait for"}
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        # what is laid out and compiled is so in the first calls
        expected = [step() for _ in range(3)][-1]
    torch.cuda.current_stream().wait_stream(beside)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    first = [x.clone() for x in captured]
    graph.replay()
    torch.cuda.synchronize()
    alike = [torch.equal(one, other) for one, other in zip(first, captured, strict=True)]
    right = all(torch.isfinite(x).all() for x in captured)
    if not dropout_p:
        right = all(torch.allclose(x, y, 1e-2) for x, y in zip(captured, expected, strict=True))
    return {"ok": bool(right) and (not any(alike) if dropout_p else all(alike))}


def _beside_flex(settings: Settings, name: str, n: int) -> dict[str, Json]:
    """FlexAttention with the same mask; both first calls at this length, compiled before."""
    parts, ids = _three(settings, n), (torch.arange(n).float() / 8).sqrt().long()
    ids = ids.to(settings.device)
    reads = name == DOCUMENTS
    text = "attention measured { causal input document: ids attend same(document) }"
    spec = parse(text) if reads else CASES[name].spec(n)
    ours = partial(_with_ids, _module(spec, settings), ids if reads else None)

    def together(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (ids[q] == ids[k])

    flex: Any = flex_attention
    if settings.compiled:
        # without `fullgraph` it would become the eager form after some compilations
        flex = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    kept = together if reads else predicate(name, n)

    def block_mask(length: int) -> Any:
        compiled = settings.compiled and settings.device == "cuda"
        return create_block_mask(
            kept, 1, 1, length, length, device=settings.device, _compile=compiled
        )

    with torch.no_grad():
        short = _three(settings, n // 2)
        ours(*short), flex(*short, block_mask=block_mask(n // 2))
        mine = _first(lambda: ours(*parts), settings)
        mask = block_mask(n)
        theirs = _first(lambda: flex(*parts, block_mask=block_mask(n)), settings)
        difference = float((ours(*parts) - flex(*parts, block_mask=mask)).abs().max())

    def rival(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = flex(q, k, v, block_mask=mask)
        return found

    if settings.device == "cpu":
        # there it has no backward
        return {"reason": "the dry run times nothing", "difference": difference}
    least = 8.0 if name in STRIDED else 0.95
    subjects: dict[str, Attention] = {"ours": ours, "flex": rival}
    for backend in ("triton", "flex"):
        one = spec.compile(backend, settings.device, 64)
        subjects[f"ours, {backend}"] = partial(_with_ids, one, ids if reads else None)
    found = _judged(_seconds(subjects, parts, settings), "flex", (least, least))
    return {**found, "difference": difference, "first": {"ours": mine, "flex": theirs}}


def _with_ids(
    module: CompiledAttention,
    ids: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    data = None if ids is None else {"document": ids[None, : q.shape[2]]}
    found: torch.Tensor = module(q, k, v, inputs=data)
    return found


def _efficiency(settings: Settings, name: str) -> dict[str, Json]:
    """What a useful pair costs beside a pair of the best dense kernel."""
    body, *targets = DENSE_SHARE[name]
    n = settings.long
    spec = parse(f"attention measured {{ {body} }}")
    parts = _three(settings, n)
    rival = {"dense": functional.scaled_dot_product_attention}
    dense = _seconds(rival, parts, settings)
    for kind in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        if settings.device != "cuda":
            continue
        try:
            with sdpa_kernel(kind):
                other = _seconds(rival, parts, settings)
        except RuntimeError:
            continue
        dense = {m: {"dense": min(dense[m]["dense"], other[m]["dense"])} for m in dense}
    ours = _seconds({"ours": _module(spec, settings)}, parts, settings)
    share = spec.relation(n).edges(n) / n**2
    eta = {mode: share * dense[mode]["dense"] / ours[mode]["ours"] for mode in ours}
    return {
        "seconds": {mode: {**ours[mode], **dense[mode]} for mode in ours},
        "eta": dict(eta),
        "target": dict(zip(eta, targets, strict=True)),
        "ok": all(value >= least for value, least in zip(eta.values(), targets, strict=True)),
    }


def _linear(settings: Settings) -> dict[str, Json]:
    """Causal linear attention in kernels, beside the package of fast linear attentions where it is
    installed; how far the kernels are from float64, in parts of what is allowed."""
    size = 128
    spec = parse("attention measured { causal attend linear() }")
    # kernels are measured whatever estimates say of them
    backend = "triton" if settings.device == "cuda" else "auto"
    ours, composed = (spec.compile(x, settings.device, size) for x in (backend, "factored"))
    parts = [_tensors(settings, settings.heads, settings.long, size) for _ in range(3)]
    with torch.no_grad():
        # the heads are apart
        exact = composed(*(x[:, :1].double() for x in parts))
        error = float((ours(*parts)[:, :1] - exact).abs().max())
    largest = float(exact.abs().max())
    allowed = error_bound(exact, exact.to(settings.dtype).double(), settings.dtype, largest)
    subjects: dict[str, Attention] = {"ours": ours}
    try:
        from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]
    except ImportError:
        seconds = _seconds(subjects, parts, settings)
        return {
            "reason": "flash-linear-attention is not installed",
            "seconds": {mode: dict(found) for mode, found in seconds.items()},
            "error": error / allowed,
        }

    def rival(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # their tensors are [B, n, H, d]; the feature map is ours
        q, k, v = (x.transpose(1, 2) for x in (functional.elu(q) + 1, functional.elu(k) + 1, v))
        found: torch.Tensor = chunk_linear_attn(q, k, v, normalize=True)[0]
        return found.transpose(1, 2)

    found = _judged(_seconds({**subjects, "fla": rival}, parts, settings), "fla", (1.0, 1.0))
    return {**found, "ok": found["ok"] and error <= allowed, "error": error / allowed}


def _longest(settings: Settings) -> dict[str, Json]:
    """Memory of a step of training at a length and at half of it."""
    spec = parse("attention measured { attend window(radius = 256) | global(first(64)) }")
    module, peaks = _module(spec, settings), []
    for n in (settings.longest // 2, settings.longest):
        parts = _three(settings, n)
        run = _waiting(called(module, parts, TRAINING), settings)
        if settings.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = _first(run, settings)
        peaks.append(torch.cuda.max_memory_allocated() if settings.device == "cuda" else 0)
    growth = peaks[1] / peaks[0] if peaks[0] else None
    return {
        "first_step_seconds": seconds,
        "peak_bytes": peaks[1],
        "growth": growth,
        "target": {"growth": 2.2},
        "ok": growth is not None and growth <= 2.2,
    }


def _chosen(settings: Settings) -> dict[str, Json]:
    """A window and blocks that an input names, 16 heads of queries to one of keys."""
    n, size, block = settings.long, 128, 64
    spec = parse(
        "attention measured { heads 64 causal input blocks: choices(size = 64)"
        " attend window(before = 511, after = 0) | chosen(blocks) }"
    )
    module = _module(spec, settings, size)
    q = _tensors(settings, 64, n, size)
    k, v = (_tensors(settings, 4, n, size) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    last = torch.arange(n) // block
    picked = (torch.rand(n, 16, generator=generator) * (last[:, None] + 1)).long()
    data = {"blocks": picked[None, None].to(settings.device)}

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module(q, k, v, inputs=data)
        return found

    seconds = _seconds({"ours": ours}, (q, k, v), settings)
    limits = {"forward": 0.025, "backward": 0.035}
    return {
        "seconds": {mode: dict(found) for mode, found in seconds.items()},
        "target": dict(limits),
        "ok": all(seconds[mode]["ours"] <= limit for mode, limit in limits.items()),
    }


def _layouts(settings: Settings) -> dict[str, Json]:
    """Laying out a window, and what a tile of it takes."""
    n = settings.longest
    relation = parse("attention measured { attend window(radius = 256) }").relation(n)
    for each in (bands_of, axis):
        each.cache_clear()
    start = perf_counter()
    layouts = layouts_of(bands_of(relation, n, n), n, n)
    seconds = perf_counter() - start
    bytes_of_tile = sum(_bytes(each) for each in layouts) / sum(len(x.keys) for x in layouts)
    return {
        "layout_seconds": seconds,
        "bytes_of_a_tile": bytes_of_tile,
        "target": {"layout_seconds": 0.05, "bytes_of_a_tile": 64},
        "ok": seconds <= 0.05 and bytes_of_tile <= 64,
    }


def _bytes(layout: StepLayout) -> int:
    parts = (layout.starts, layout.keys, layout.kinds, layout.masks)
    return sum(part.nbytes for part in parts)


def _shape(settings: Settings, name: str, shape: Shape, padded: bool) -> dict[str, Json]:
    """A shape that people use beside the best call of torch: nothing, `is_causal`, or a mask."""
    spec = parse(f"attention measured {{ {SHAPE_PATTERNS[name]} }}")
    module = _module(spec, settings)
    parts = [_tensors(settings, shape.heads, shape.n, 64, shape.batch) for _ in range(3)]
    padding = padding_of(shape).to(settings.device) if padded else None
    held = torch.from_numpy(spec.mask(shape.n)).to(settings.device)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = module(q, k, v, key_padding_mask=padding)
        return found

    subjects = {"ours": ours, "torch": torch_call(held, padding)}
    return _judged(_seconds(subjects, parts, settings), "torch", (0.8, 0.8))
