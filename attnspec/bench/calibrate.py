"""Measures the rates of the cost model on this machine, of its CPU or of its GPU.

Every backend runs a few patterns whose amounts differ: many pairs and few, FULL tiles and masks,
tokens in order and out of it. The rates are the non-negative numbers that explain the measured
times best, in relative terms, by least squares. What the measurements do not decide stays in
proportion to the rates that ship.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from time import perf_counter

import numpy as np
import torch
from scipy.optimize import nnls

from attnspec.backends import BACKENDS
from attnspec.backends.common.composed import ComposedTables
from attnspec.backends.common.masks import with_data
from attnspec.backends.edges.backend import EdgesBackend
from attnspec.backends.one_block.backend import Dense, TorchCall
from attnspec.backends.tables.backend import TILES, TablesBackend
from attnspec.backends.tables.kernel import SteppedKernel
from attnspec.bench.timing import Timing, machine, turns
from attnspec.elaborate import elaborate
from attnspec.ir.program import Program
from attnspec.ir.scalars import fold
from attnspec.ir.scores import NAMED, Scores
from attnspec.layout.orders import NATURAL, Order
from attnspec.layout.steps import amounts_of, banded, natural_tables, stepped_tables
from attnspec.limits import LIMITS
from attnspec.lower.costs import Amounts, Calibration, Rates, RatesError, shipped, weighed
from attnspec.lower.lower import Binder
from attnspec.lower.work import Backend, Call, Kernel, Work, refusal_of
from attnspec.text.decoding import source_of
from attnspec.text.diagnostics import first_line

HEADS, SIZE = 4, 64
"""The shape of what is run; rates are for one head."""

ROUNDS = 8
"""Turns of all trials."""

SECONDS = 30.0
"""No further turn begins after so long; a whole round is done in any case."""

TIE = 0.1
"""How much weight the rates that ship have, where that of one measurement is 1."""

LEAST = 0.1
"""The smallest rate, as a part of what ships on a machine that is as much faster: nothing is free,
or the planner would take any amount of it."""

CPU = torch.device("cpu")

GPU_HEADS = 16
"""Heads of what runs on a GPU, which few do not fill."""

GPU = (
    ("full", 256),
    ("full", 4096),
    ("causal", 8192),
    ("causal", 32768),
    ("window(radius = 16)", 1024),
    ("window(radius = 64)", 4096),
    ("window(radius = 512)", 4096),
    ("window(radius = 512)", 32768),
    ("block(size = 256)", 32768),
    ("strided(stride = 64)", 8192),
    ("dilated(radius = 1024, step = 8)", 32768),
    ("random(keys = 4, seed = 0)", 8192),
    ("random(keys = 32, seed = 0)", 16384),
    ("window(radius = 128) | global(first(64))", 16384),
)
"""What every backend runs on a GPU that does not refuse it, or take more than `DEAREST`."""

SUMS = (
    ("causal attend linear()", 2048),
    ("causal attend linear()", 16384),
    ("causal attend linear()", 65536),
    ("attend linear(feature = relu)", 65536),
    ("causal attend favor(features = 64)", 16384),
    ("causal attend window(before = 511, after = 0) + linear()", 16384),
)
"""Mechanisms that run on a GPU, in every way that there is."""

DEAREST = 0.1
"""Seconds that a trial of one head may be expected to take."""

DENSE = (("full", 64), ("full", 256), ("window(radius = 64)", 1024), ("causal", 2048))

SCATTERED = (
    ("random(keys = 2, seed = 0)", 256),
    ("random(keys = 4, seed = 0)", 8192),
    ("random(keys = 64, seed = 0)", 2048),
    ("random(keys = 32, seed = 0)", 8192),
    # here keys no longer fit the caches next to the cores
    ("random(keys = 32, seed = 0)", 16384),
    ("expander(degree = 32, seed = 0)", 16384),
    ("window(radius = 200)", 16384),
)

TILED = (
    ("window(radius = 8)", 256),
    ("window(radius = 16)", 4096),
    ("window(radius = 512)", 4096),
    ("block(size = 256)", 4096),
    ("strided(stride = 64)", 1024),
    ("window(radius = 128) | global(first(64))", 16384),
)
"""What is run in tiles of each size."""

STEPPED = (
    (256, ("window(radius = 8)", 1)),
    (8192, ("window(radius = 16)", 1)),
    (4096, ("window(radius = 512)", 1)),
    (8192, ("block(size = 256)", 1)),
    (4096, ("residue(step = 8)", 8)),
    (8192, ("residue(step = 32)", 32)),
    (8192, ("dilated(radius = 1024, step = 8)", 8)),
    (4096, ("window(radius = 64) | global(first(64))", 1)),
    (8192, ("residue(step = 64)", 64), ("window(radius = 63) - residue(step = 64)", 1)),
    (4096, ("window(radius = 32)", 1), ("block(size = 128) - window(radius = 32)", 1)),
)
"""What is run in steps, each with the step of its order: one in tiles of each size, two in small
ones."""

PACKED = 4096
"""The length at which documents are laid out."""


@dataclass
class Trial:
    """Something to run; `amounts` are those of one head. Where it cannot be built or run there is a
    `reason`, and it is left out; else `seconds` of one head are the least that it took, `median`
    the median, and `expected` those of the fitted rates."""

    name: str
    amounts: Amounts
    run: Callable[[], object]
    reason: str | None = None
    seconds: float = 0.0
    median: float = 0.0
    expected: float = 0.0

    def __call__(self) -> None:
        """Run it, unless it failed before."""
        if self.reason is not None:
            return
        try:
            self.run()
        except Exception as error:  # one that fails must not end the others
            self.reason = first_line(error, 300)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()


def trials(device: str = "cpu") -> Iterator[Trial]:
    """Everything that is run on a type of device, built one by one."""
    return _on_cpu() if device == "cpu" else _on_gpu(device)


def gpu_works(device: str) -> Iterator[tuple[str, Work, Backend, Amounts]]:
    """What every backend runs there, and what one head's part of it takes."""
    graphs = ((f"attend {text}", n) for text, n in GPU)
    for body, n in (*graphs, *SUMS):
        work = replace(_work_of(body, n), device=device, copies=GPU_HEADS)
        for backend in BACKENDS:
            if refusal_of(backend, work, device) is not None or backend.cost(work) > DEAREST:
                continue
            # nothing where a backend does not say
            amounts: Amounts = getattr(backend, "amounts", lambda work: {})(work)
            if amounts:
                yield body.removeprefix("attend "), work, backend, amounts


def _on_gpu(device: str) -> Iterator[Trial]:
    place = torch.device(device)
    for text, work, backend, amounts in gpu_works(device):
        name = backend.name
        try:
            kernel = backend.build(work, tuple(range(GPU_HEADS)), place)
            trial = _trial(name, text, work, amounts, kernel, place)
        except Exception as error:  # no memory, or no kernel: others may have both
            trial = Trial(_title(name, text, work), amounts, lambda: None, first_line(error, 300))
        yield trial


def _on_cpu() -> Iterator[Trial]:
    for text, n in DENSE:
        work = _work(text, n)
        for backend in (Dense(), TorchCall()):
            kernel = backend.build(work, _HEADS, CPU)
            yield _trial(backend.name, text, work, backend.amounts(work), kernel)
    edges, capped = EdgesBackend(), Scores((fold(NAMED["softcap"], {"cap": 50.0}),))
    for text, n in SCATTERED:
        for work in (_work(text, n), replace(_work(text, n), changes=capped)):
            kernel = edges.build(work, _HEADS, CPU)
            yield _trial("edges", text, work, edges.amounts(work), kernel)
    tiles = TablesBackend()
    for text, n in TILED:
        work = _work(text, n)
        sizes = {tile: tiles.amounts(work, tile) for tile in TILES if tile < n}
        for tile, amounts in sizes.items():
            if shipped("cpu").seconds(amounts) <= DEAREST:
                kernel = ComposedTables(work, _HEADS, CPU, natural_tables(work, tile))
                yield _trial(f"tiles of {tile}", text, work, amounts, kernel)
    for n, *steps in STEPPED:
        text = " | ".join(part for part, _ in steps)
        work, one = _work(text, n), len(steps) == 1
        for target in LIMITS.tile_sizes if one else LIMITS.tile_sizes[:1]:
            bands = tuple(
                banded(_work(part, n).relation, n, n, Order(step, step), target)
                for part, step in steps
            )
            kernel = SteppedKernel(work, _HEADS, CPU, stepped_tables(bands))
            name = f"tables of {target}" if one else "tables"
            yield _trial(name, text, work, amounts_of(bands, HEADS), kernel)
    layout = weighed("tables", {"layout": 1}, copies=HEADS)
    yield Trial(f"packed documents, n = {PACKED}", layout, _packed(PACKED))


_HEADS = tuple(range(HEADS))


def _program(body: str) -> Program:
    return elaborate(source_of(f"attention trial {{ {body} }}")).program


def _work_of(body: str, n: int) -> Work:
    """What one head of a program computes."""
    ((work, _),) = Binder(_program(body)).works(0, 1, n, n)
    return work


def _work(text: str, n: int) -> Work:
    return replace(_work_of(f"attend {text}", n), copies=HEADS)


def _trial(
    name: str, text: str, work: Work, amounts: Amounts, kernel: Kernel, place: torch.device = CPU
) -> Trial:
    generator = torch.Generator().manual_seed(0)
    on_cpu = place.type == "cpu"
    shape = (1, HEADS if on_cpu else GPU_HEADS, work.n_q, SIZE)
    parts = [torch.randn(shape, generator=generator) for _ in range(3)]
    q, k, v = (x if on_cpu else x.to(place, torch.bfloat16) for x in parts)
    call = Call()

    def run() -> object:
        with torch.no_grad():
            output = kernel(q, k, v, call)
        if not on_cpu:
            torch.cuda.synchronize(place)
        return output

    return Trial(_title(name, text, work), amounts, run)


def _title(name: str, text: str, work: Work) -> str:
    changed = ", scores changed" if work.changes else ""
    return f"{name}, {text}{changed}, n = {work.n_q}"


def _packed(n: int) -> Callable[[], object]:
    """Lays out packed documents of unequal lengths; a layout serves all heads."""
    program = _program("input ids: ids causal attend same(ids)")
    ((work, _),) = Binder(program).works(0, HEADS, n, n)
    ids = np.sqrt(np.arange(n) / 8).astype(np.int64)

    def run() -> object:
        # inputs are compared by identity, so these are new each time
        relation = with_data(work.relation, {"ids": ids})
        return banded(relation, n, n, NATURAL, LIMITS.tile_sizes[0]).layout

    return run


def calibrate(
    device: str = "cpu", show: Callable[[float, str], None] = lambda share, doing: None
) -> tuple[Calibration, list[Trial], list[Trial]]:
    """Runs all trials of a type of device in turns and fits the rates to those that did not fail:
    the rates, these trials and the others; `show` is told the share that is done.

    Raises RatesError where all of them failed.
    """
    every = list[Trial]()
    for trial in trials(device):
        show(0.0, f"preparing {trial.name}")
        every.append(trial)
    timed = _timed([trial for trial in every if trial.reason is None], show)
    failed = [trial for trial in every if trial.reason is not None]
    done = [trial for trial in every if trial.reason is None]
    if not done:
        raise RatesError("; ".join(f"{one.name}: {one.reason}" for one in failed[:3]))
    heads = HEADS if device == "cpu" else GPU_HEADS
    for trial in done:
        # what slows a machine for a while is not the kernel's
        trial.seconds = timed[trial.name].least / heads
        trial.median = timed[trial.name].median / heads
    rates = fitted([x.amounts for x in done], [x.seconds for x in done], shipped(device))
    for trial in done:
        trial.expected = rates.seconds(trial.amounts)
    calibration = Calibration(rates, torch.get_num_threads(), torch.__version__, machine(device))
    return calibration, done, failed


def _timed(some: Sequence[Trial], show: Callable[[float, str], None]) -> dict[str, Timing]:
    """The times of all that run, in turns."""
    runs = {trial.name: trial for trial in some}
    steps = len(runs) * (ROUNDS + 1)
    timed: dict[str, Timing] = {}
    start = perf_counter()
    for done, (name, timing) in enumerate(turns(runs, ROUNDS, SECONDS), 1):
        timed = timing
        show(max(done / steps, min(1.0, (perf_counter() - start) / SECONDS)), name)
    return timed


def fitted(amounts: Sequence[Amounts], seconds: Sequence[float], known: Rates) -> Rates:
    """The rates that explain the seconds that these amounts took, in relative terms, near those
    that are `known`."""
    default = asdict(known)
    names, before = [*default], np.array([*default.values()])
    table = np.array([[each.get(name, 0.0) for name in names] for each in amounts]) * before
    # one unknown for each rate, in units of what ships; one row for each measurement, in units of
    # its time
    rows = table / np.array(seconds)[:, None]
    slower = float(statistics.median(1.0 / rows.sum(axis=1)))
    tied = np.eye(len(names)) * TIE / slower
    right = np.concatenate([np.ones(len(rows)), np.full(len(names), TIE)])
    shares, _ = nnls(np.concatenate([rows, tied]), right)
    values = np.maximum(shares, LEAST * slower) * before
    rates = {name: float(f"{x:.4g}") for name, x in zip(names, values, strict=True)}
    return Rates(**rates)
