"""`python -m benchmarks.gpu --seconds 3000`: check and time everything on a GPU.

First every spec of the zoo is checked against float64 in half precision, then the targets are timed
beside FlexAttention, torch's own calls and flash-linear-attention. Each row is written as soon as
it is known, so that a run that ends, by its time limit or in a row that hangs, goes on behind the
row where it ended when the command is given again; `--again` starts anew. `--dry-run` goes through
all of it on the CPU at lengths that mean nothing.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import attnspec
from attnspec.bench.timing import alternate, machine, versions
from attnspec.elaborate import attention_names
from attnspec.spec import Spec
from attnspec.text.decoding import read_source
from benchmarks.cases import CASES, SHAPE_PATTERNS, SHAPES, Shape
from benchmarks.gpu_checks import Row, Tensors, able, checked
from benchmarks.masks import predicate
from benchmarks.measuring import PACKAGES, read, write
from benchmarks.shapes import called, padding_of, torch_call

RESULTS = Path(__file__).resolve().parent / "results" / "gpu.json"

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

CHECKS = 0.6
"""The share of the time that checks may take."""

LONGEST = 180
"""Seconds that a row may take, after which its process ends."""

UNENDED = "the process ended in it, or was ended"
"""The reason of a row that began."""

TARGETS: Mapping[str, str] = {
    "G0": "static graphs and those of inputs: no training step waits for the device; CUDA graphs"
    " can capture one",
    "G1": "compiled FlexAttention with the same mask, n = 8,192: at least 0.95 times as fast, 8"
    " times on strided, dilated and fixed",
    "G2": "efficiency against torch's dense kernel, forward / backward: at least 0.45 / 0.35 on a"
    " window, 0.35 / 0.25 on strided, dilated and fixed",
    "G3": "flash-linear-attention, causal linear attention: never slower",
    "G4": "window and global tokens, a training step: memory grows with n",
    "G5": "`window(before = 511) \\| chosen`, n = 65,536, 16 chosen blocks of 64 keys, 64 query"
    " heads, 4 key heads, size 128: at most 25 ms forward, 35 ms backward",
    "G7": "torch's best call, common shapes up to n = 2,048: at least 0.8 times as fast",
}
"""What is aimed at, by the first letters of a row's name."""

STRIDED = ("strided(128)", "causal strided(128)", "dilated(2048, 8)", "fixed(128, 8)")
"""Patterns that FlexAttention in natural order computes many times too much of."""

DOCUMENTS = "causal input document: ids attend same(document)"

UNINTERRUPTED = (
    "causal attend window(before = 511, after = 0) | residue(step = 128)",
    "attend window(radius = 256) | global(first(64)) score softcap(cap = 30)",
    DOCUMENTS,
    "causal input document: ids attend where(document(q) - document(k) <= 2)",
)
"""Specs whose calls leave the host free. Data-dependent lists are as long as the longest, for
which the host waits."""

BESIDE_FLEX = {
    **{name: CASES[name].body for name in STRIDED},
    **{name: CASES[name].body for name in ("window(256)", "causal window(511)")},
    "Longformer 256 + 64": CASES["Longformer 256 + 64"].body,
    "documents": DOCUMENTS,
}

EFFICIENCY = {
    "window(before 1023)": ("attend window(before = 1023, after = 0)", 0.45, 0.35),
    **{name: (CASES[name].body, 0.35, 0.25) for name in (*STRIDED[:1], *STRIDED[2:])},
}
"""Patterns with the least efficiency that is aimed at, forward and backward."""


@dataclass(frozen=True)
class Settings:
    """Where and how far is checked and timed; `every` leaves out all files of the zoo but one in so
    many, and most rows of a kind."""

    device: str = "cuda"
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    checked: tuple[int, ...] = (1_000, 127, 1, 8_192, 47_000, 131_072)
    lengths: tuple[int, ...] = (8_192, 32_768, 131_072)
    long: int = 65_536
    longest: int = 1 << 20
    shapes: tuple[Shape, ...] = SHAPES
    heads: int = 16
    rounds: int = 3
    every: int = 1

    @property
    def gpu(self) -> bool:
        return self.device == "cuda"


DRY = Settings("cpu", (torch.bfloat16,), (1, 33), (256,), 256, 1024, (Shape(2, 2, 40),), 2, 1, 24)


def rows(at: Settings) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """Everything that is done: `checks` or `times`, a name, and what measures the row; what is
    worth most comes first."""
    files = sorted(EXAMPLES.glob("*.attn"))[:: at.every]
    named = [(path, name) for path in files for name in attention_names(read_source(path))]
    for length in at.checked:
        for turn in range(2):
            for path, name in named:
                spec = attnspec.load(path, name=name)
                n = spec.program.fixed_length or length
                backends = able(spec, n, at.device)
                for backend in backends if turn else backends and ["auto"]:
                    for dtype in at.dtypes:
                        kind = str(dtype).removeprefix("torch.")
                        title = f"check {path.name}:{name}, n = {n}, {kind}, {backend}"
                        yield "checks", title, partial(checked, at.device, spec, n, dtype, backend)
    for number, (title, measure) in enumerate(timings(at)):
        if at.every == 1 or number % 3 == 0 or title[:2] not in ("G0", "G1", "G2", "G7"):
            yield "times", title, measure


def timings(at: Settings) -> Iterator[tuple[str, Callable[[], Row]]]:
    for body in UNINTERRUPTED:
        for backend, p in (("triton", 0.0), ("flex", 0.0), ("triton", 0.1)):
            title = f"G0, {backend}{' with dropout' * (p > 0)}, {body}"
            yield title, partial(uninterrupted, at, body, backend, p)
    for shape in at.shapes:
        for name in SHAPE_PATTERNS:
            for padded in (False, True):
                title = f"G7, {name}, {shape}{', padded' * padded}"
                yield title, partial(in_shape, at, name, shape, padded)
    for name in EFFICIENCY:
        yield f"G2, {name}, n = {at.long:,}", partial(efficiency, at, name)
    yield f"G3, causal linear, n = {at.long:,}", partial(linear, at)
    yield f"G4, window + global, n = {at.longest:,}", partial(longest, at)
    yield f"G5, window | chosen, n = {at.long:,}", partial(chosen, at)
    # FlexAttention compiles longest
    for n in at.lengths:
        for name in BESIDE_FLEX:
            yield f"G1, {name}, n = {n:,}", partial(beside_flex, at, name, n)


# --- times ---------------------------------------------------------------------------------------


def measured(body: str) -> Spec:
    return attnspec.parse(f"attention measured {{ {body} }}")


def tensors(
    at: Settings, n: int, heads: int | Sequence[int] = 0, size: int = 64, batch: int = 1
) -> list[torch.Tensor]:
    """Queries, keys and values, each with numbers of its own."""
    counts = [heads or at.heads] * 3 if isinstance(heads, int) else heads
    drawn = torch.Generator().manual_seed(0)
    each = [torch.randn(batch, count, n, size, generator=drawn) for count in counts]
    return [x.to(at.device, at.dtypes[0]) for x in each]


def waited(at: Settings, run: Callable[[], object]) -> object:
    """The call and waiting for its end."""
    found = run()
    if at.gpu:
        torch.cuda.synchronize()
    return found


def seconds_of(at: Settings, subjects: Mapping[str, Any], inputs: Tensors) -> Any:
    """The median seconds of each subject, forward, and what a backward takes beyond."""
    times = []
    for mode in ("forward", "training"):
        runs = {k: partial(waited, at, called(x, inputs, mode)) for k, x in subjects.items()}
        times.append({k: t.median for k, t in alternate(runs, at.rounds).items()})
    backward = {name: max(times[1][name] - x, 1e-9) for name, x in times[0].items()}
    return {"forward": times[0], "backward": backward}


def judged(seconds: Any, rival: str, least: tuple[float, float]) -> Row:
    """Times, how many times faster than the rival, and whether that is as aimed at."""
    ratios = {mode: found[rival] / found["ours"] for mode, found in seconds.items()}
    wanted = dict(zip(ratios, least, strict=True))
    ok = all(ratios[mode] >= wanted[mode] for mode in wanted)
    return {"seconds": seconds, "ratio": ratios, "target": wanted, "ok": ok}


def uninterrupted(at: Settings, body: str, backend: str, p: float) -> Row:
    """A step of training never waits for the device and can be captured; what is played back is
    what was computed, and of dropped weights another choice each time."""
    if not at.gpu:
        return {"reason": "there is no GPU to wait for"}
    spec, n = measured(body), min(at.lengths)
    module = spec.compile(backend, at.device, 64).to(at.dtypes[0])
    parts = [x.requires_grad_() for x in tensors(at, n)]
    ids = torch.arange(n, device=at.device)[None] // 1000
    inputs = {"document": ids} if spec.inputs else None

    def step() -> list[torch.Tensor]:
        out = module(*parts, dropout_p=p, inputs=inputs)
        return [out, *torch.autograd.grad(out.square().sum(), parts)]

    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(beside):
        # what is laid out and compiled is so in the first calls
        expected = [step() for _ in range(3)][-1]
    torch.cuda.synchronize()
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
    if not p:
        right = all(torch.allclose(x, y, 1e-2) for x, y in zip(captured, expected, strict=True))
    return {"ok": bool(right) and (not any(alike) if p else all(alike))}


def beside_flex(at: Settings, name: str, n: int) -> Row:
    """FlexAttention with the same mask, compiled."""
    spec, inputs = measured(BESIDE_FLEX[name]), tensors(at, n)
    ids = (torch.arange(n).float() / 8).sqrt().long().to(at.device)
    data = {"document": ids[None]} if spec.inputs else None
    backends = {"ours": "auto", "ours, triton": "triton", "ours, flex": "flex"}
    subjects: dict[str, Any] = {
        title: partial(spec.compile(x, at.device, 64), inputs=data)
        for title, x in backends.items()
        if at.gpu or x == "auto"
    }

    def together(b: Any, h: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (ids[q] == ids[k])

    # without `fullgraph` it would become the eager form after some compilations
    flex: Any = torch.compile(flex_attention, fullgraph=True) if at.gpu else flex_attention
    kept = together if spec.inputs else predicate(name, n)
    mask = create_block_mask(kept, 1, 1, n, n, device=at.device, _compile=at.gpu)
    subjects["flex"] = partial(flex, block_mask=mask)
    with torch.no_grad():
        difference = float((subjects["ours"](*inputs) - subjects["flex"](*inputs)).abs().max())
    if not at.gpu:
        # there it has no backward
        return {"reason": "the dry run times nothing", "difference": difference}
    least = 8.0 if name in STRIDED else 0.95
    return judged(seconds_of(at, subjects, inputs), "flex", (least, least)) | {
        "difference": difference
    }


def efficiency(at: Settings, name: str) -> Row:
    """What a useful pair costs beside a pair of the dense kernel that torch chooses."""
    body, *least = EFFICIENCY[name]
    spec, n = measured(body), at.long
    subjects = {
        "ours": spec.compile(device=at.device, head_size=64),
        "dense": functional.scaled_dot_product_attention,
    }
    seconds = seconds_of(at, subjects, tensors(at, n))
    share = spec.relation(n).edges(n) / n**2
    eta = {mode: share * found["dense"] / found["ours"] for mode, found in seconds.items()}
    ok = all(value >= wanted for value, wanted in zip(eta.values(), least, strict=True))
    return {"seconds": seconds, "eta": eta, "target": least, "ok": ok}


def linear(at: Settings) -> Row:
    """Causal linear attention in kernels, whatever estimates say of them, beside the package of
    fast linear attentions."""
    try:
        from fla.ops.linear_attn import chunk_linear_attn  # type: ignore[import-not-found]
    except ImportError:
        return {"reason": "flash-linear-attention is not installed"}

    def rival(*parts: torch.Tensor) -> torch.Tensor:
        # their tensors are [B, n, H, d]; the feature map is ours
        q, k, v = (
            x.transpose(1, 2) for x in (*(functional.elu(x) + 1 for x in parts[:2]), parts[2])
        )
        found: torch.Tensor = chunk_linear_attn(q, k, v, normalize=True)[0]
        return found.transpose(1, 2)

    ours = measured("causal attend linear()").compile("triton", at.device, 128)
    parts = tensors(at, at.long, size=128)
    return judged(seconds_of(at, {"ours": ours, "fla": rival}, parts), "fla", (1.0, 1.0))


def longest(at: Settings) -> Row:
    """Memory of a step of training at a length and at half of it."""
    module = measured("attend window(radius = 256) | global(first(64))").compile(device=at.device)
    peaks = []
    for n in (at.longest // 2, at.longest):
        run = called(module, tensors(at, n), "training")
        if at.gpu:
            torch.cuda.reset_peak_memory_stats()
        waited(at, run)
        peaks.append(torch.cuda.max_memory_allocated() if at.gpu else 1)
    growth = peaks[1] / peaks[0]
    return {"peak_bytes": peaks[1], "growth": growth, "ok": growth <= 2.2}


def chosen(at: Settings) -> Row:
    """A window and blocks that an input names, 16 heads of queries to one of keys."""
    n, block = at.long, 64
    module = measured(
        "heads 64 causal input blocks: choices(size = 64)"
        " attend window(before = 511, after = 0) | chosen(blocks)"
    ).compile(device=at.device, head_size=128)
    parts = tensors(at, n, (64, 4, 4), 128)
    drawn = torch.rand(n, 16, generator=torch.Generator().manual_seed(0))
    picked = (drawn * (torch.arange(n)[:, None] // block + 1)).long()
    ours = partial(module, inputs={"blocks": picked[None, None].to(at.device)})
    seconds = seconds_of(at, {"ours": ours}, parts)
    most = {"forward": 0.025, "backward": 0.035}
    ok = all(seconds[mode]["ours"] <= limit for mode, limit in most.items())
    return {"seconds": seconds, "target": dict(most), "ok": ok}


def in_shape(at: Settings, name: str, shape: Shape, padded: bool) -> Row:
    """A shape that people use beside the best call of torch: nothing, `is_causal`, or a mask."""
    spec = measured(SHAPE_PATTERNS[name])
    parts = tensors(at, shape.n, shape.heads, 64, shape.batch)
    padding = padding_of(shape).to(at.device) if padded else None
    ours = partial(spec.compile(device=at.device, head_size=64), key_padding_mask=padding)
    held = torch.from_numpy(spec.mask(shape.n)).to(at.device)
    subjects = {"ours": ours, "torch": torch_call(held, padding)}
    return judged(seconds_of(at, subjects, parts), "torch", (0.8, 0.8))


# --- the run -------------------------------------------------------------------------------------


def run(path: Path, at: Settings, seconds: float, only: str | None) -> bool:
    """Measure the rows that the file does not have, as far as the time goes, and print each;
    whether the device is still there."""
    figures: Any = {"checks": {}, "times": {}, **read(path)}
    figures |= {"machine": machine(at.device)}
    figures |= {"versions": versions((*PACKAGES, "triton", "fla-core"))}
    start = perf_counter()
    for part, name, measure in rows(at):
        known = name in figures[part] and "earlier" not in figures[part][name]
        if known or only not in (None, part):
            continue
        if perf_counter() - start > seconds * (CHECKS if (part, only) == ("checks", None) else 1):
            print(f"{part}: the time is over, give the command again to go on", flush=True)
            if part == "times":
                break
            continue
        # what ends the process is not tried again, and what raises is as wrong as what errs
        wrong: Row = {"ok": False} if part == "checks" else {}
        figures[part][name] = {"reason": UNENDED, **wrong}
        write(path, figures)
        # it reaches a process that is blocked in the driver, as no exception does
        faulthandler.dump_traceback_later(LONGEST, exit=True, file=2)
        lost = False
        try:
            found = measure()
        except Exception as error:  # one row that fails must not end the others, and says why
            found = {"reason": f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.300}"}
            # after an illegal access every later call fails
            lost = isinstance(error, torch.AcceleratorError)
        faulthandler.cancel_dump_traceback_later()
        # compilations of a kind are limited, and those of one row do not count for the next
        torch.compiler.reset()
        figures[part][name] = {**wrong, **found}
        print(f"{name}: {found}", flush=True)
        write(path, figures)
        if lost:
            return False
        if at.gpu:
            torch.cuda.empty_cache()
    write(path, figures)
    return True


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=3000.0, help="end after so long")
    parser.add_argument("--only", choices=("checks", "times"))
    parser.add_argument("--again", action="store_true", help="forget the rows that are there")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at small lengths")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of the figures")
    options = parser.parse_args(arguments)
    if not options.dry_run and not torch.cuda.is_available():
        print("torch has no GPU here: --dry-run goes through it on the CPU", file=sys.stderr)
        return 2
    if options.dry_run and options.results == RESULTS:
        print("--dry-run measures nothing: name another file by --results", file=sys.stderr)
        return 2
    path = options.results
    if options.again:
        path.unlink(missing_ok=True)
    there = run(path, DRY if options.dry_run else Settings(), options.seconds, options.only)
    found: Any = read(path)
    failed = [
        name
        for part in ("checks", "times")
        for name, row in found.get(part, {}).items()
        if row.get("ok") is False
    ]
    print(f"{len(failed)} rows are not as they should be", *failed, sep="\n- ")
    return 0 if there else 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
