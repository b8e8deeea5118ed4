"""Graphs that the data decide: what a useful pair costs, choosing it included, and how that grows.

The keys that a choice is made for are drawn, so that lists differ from query to query, which is the
hardest case: nothing is shared. `lsh` stands beside Reformer's package, where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch.nn import functional

from attnspec.bench.timing import Timing, alternate
from attnspec.spec import Spec, parse
from benchmarks.cases import BATCH, HEADS, SIZE, Settings
from benchmarks.efficiency import DENSE
from benchmarks.fresh import Arguments, Run, integer, peak, text
from benchmarks.measuring import Json, exponent, missing, planned, tensors
from benchmarks.packages import reformer

BLOCKS, WIDTH = 16, 64
"""Blocks that a query reads, and their positions."""

TARGETS = {"chosen": 0.35, "topk": 1.3, "lsh": 4.0, "growth": 1.2}
"""The least efficiency of lists, the most that choosing may cost beside the product of its scores
and the tiles, how many times faster than the package `lsh` is, and the most that time may grow."""

PRODUCT, LISTS = "scores' product", "chosen"
"""What `topk` is made of, among the subjects."""

PACKAGE = "reformer-pytorch"
"""What `lsh` is compared with, among the subjects."""

BODIES = {
    LISTS: f"input sel: choices(size = {WIDTH})\n attend chosen(sel)",
    "topk": f"attend topk(blocks = {BLOCKS}, size = {WIDTH}, queries = 1)",
    "lsh": "attend lsh(rounds = 4, chunk = 64)",
    "cluster": "attend cluster(count = isqrt(n))",
}
"""What is measured, by name."""

SHARED = ("lsh", PACKAGE)
"""Those whose keys are the queries."""


def spec_of(name: str) -> Spec:
    """The spec of a body, or of what the package does."""
    return parse(f"attention measured {{ {BODIES['lsh' if name == PACKAGE else name]} }}")


def subject(name: str, n: int, mode: str) -> Callable[[], object]:
    """One call, or one with the gradients of q, k and v, of a body, of the package, or of dense
    attention."""
    q, k, v = tensors(n)
    if name in SHARED:
        k = q
    module = None if name == DENSE else spec_of(name).compile()
    inputs = {"sel": drawn_lists(n)} if name == LISTS else None

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if module is None:
            return functional.scaled_dot_product_attention(q, k, v)
        if name == PACKAGE:
            return reformer(module, q, k, v)()
        out: torch.Tensor = module(q, q if name in SHARED else k, v, inputs=inputs)
        return out

    def forward() -> object:
        with torch.no_grad():
            return attend(q, k, v)

    def both() -> object:
        return torch.autograd.grad(attend(*given), asked, upstream)

    if mode == "forward":
        return forward
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    asked = given[::2] if name in SHARED else given
    upstream = torch.ones_like(q)
    return both


def drawn_lists(n: int) -> torch.Tensor:
    """Different blocks for every query and head, int64 [B, H, n, BLOCKS]."""
    generator = torch.Generator().manual_seed(1)
    blocks = max(1, n // WIDTH)
    shape = BATCH, HEADS, n, 1
    start = torch.randint(blocks, shape, generator=generator)
    step = torch.randint(1, max(2, blocks // BLOCKS + 1), shape, generator=generator)
    return (start + step * torch.arange(min(BLOCKS, blocks))) % blocks


def product(n: int) -> Callable[[], object]:
    """The scores of every query and block, in parts that stay in the cache."""
    q, k, _ = tensors(n)
    means = k[:, :, : n // WIDTH * WIDTH].reshape(BATCH, HEADS, -1, WIDTH, SIZE).mean(3)

    def run() -> object:
        return [q[:, :, low : low + 1024] @ means.mT for low in range(0, n, 1024)]

    return run


def measure(settings: Settings, run: Run) -> dict[str, Json]:
    """Efficiency of lists, what choosing costs, growth, and memory."""
    n = settings.n
    timed: dict[str, dict[str, Timing]] = {}
    # it takes no other lengths
    there = find_spec("reformer_pytorch") is not None and n % (2 * WIDTH) == 0
    rivals = (DENSE, PACKAGE) if there else (DENSE,)
    for mode in ("forward", "both"):
        subjects = {name: subject(name, n, mode) for name in (*rivals, *BODIES)}
        if mode == "forward":
            subjects[PRODUCT] = product(n)
        timed[mode] = alternate(subjects, settings.rounds)
    edges = n * min(n, BLOCKS * WIDTH)
    eta = {
        mode: edges / n**2 * found[DENSE].median / found[LISTS].median
        for mode, found in timed.items()
    }
    found = timed["forward"]
    least = found[PRODUCT].median + found[LISTS].median
    return {
        "n": n,
        "rows": [
            {
                "name": name,
                "spec": BODIES[name],
                **{mode: found[name].data() for mode, found in timed.items()},
                "backends": planned(spec_of(name), n)["backends"],
            }
            for name in BODIES
        ],
        "dense": {mode: found[DENSE].data() for mode, found in timed.items()},
        "summary": {
            "eta_forward": eta["forward"],
            "eta_both": eta["both"],
            "topk": found["topk"].median / least,
            "lsh": {
                mode: found[PACKAGE].median / found["lsh"].median if PACKAGE in found else None
                for mode, found in timed.items()
            },
        },
        "growth": _growth(settings),
        "memory": _memory(settings, run),
    }


def _growth(settings: Settings) -> list[Json]:
    """How time grows for what should hardly do more than the sequence."""
    rows: list[Json] = []
    for name in ("lsh", "cluster"):
        values = [
            alternate({name: subject(name, n, "forward")}, settings.rounds)[name].median
            for n in settings.growth
        ]
        row: dict[str, Json] = {"name": name, "lengths": [*settings.growth], "seconds": [*values]}
        rows.append({**row, "exponent": exponent(settings.growth, values)})
    return rows


def _memory(settings: Settings, run: Run) -> list[Json]:
    """The peaks of training steps, each in a process of its own."""
    rows: list[Json] = []
    for name in BODIES:
        for n in settings.memory:
            asked: Arguments = {"name": name, "n": n, "threads": torch.get_num_threads()}
            found = run("decided", asked)
            if "reason" in found:
                found = missing(name, found["reason"])
            rows.append({"name": name, "n": n, **found})
    return rows


def decided_task(arguments: Arguments) -> dict[str, Json]:
    """What one step needs at its peak beyond its inputs, choices among them, and gradients."""
    name, n = text(arguments, "name"), integer(arguments, "n")
    subject(name, 512, "both")()
    step = subject(name, n, "both")
    held = 4 * BATCH * HEADS * n * SIZE * torch.float32.itemsize
    before = peak()
    step()
    extra = peak() - before
    return {"extra_bytes": extra, "held_bytes": held, "ratio": extra / held}
