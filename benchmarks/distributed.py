"""One sequence over 1 to 4 local processes: bytes, and times beside an all-gather of keys.

`python -m benchmarks.distributed` starts the processes of each number of ranks once, prints each
case as it is found and writes `results/distributed.json`; numbers of ranks that the file has are
left out, so that a run that was stopped is gone on with. Each case is timed beside the plainest
way, all keys and values to every rank (gloo's all-gather) and own queries over all of them by
torch's own call with the mask made beforehand, in turns. Times over processes of one machine say
what the exchange costs beside the work, not what a network does. What travels between more ranks is
in `benchmarks.exchange`, on paper.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import attnspec
from attnspec.bench.timing import machine, versions
from attnspec.distributed import parallelize
from benchmarks.measuring import Json, read, write

CASES = {
    "window(radius = 256)": "attend window(radius = 256)",
    "window and 16 globals": "attend window(radius = 256) | global(first(16))",
    "causal": "causal attend full",
    "causal linear": "causal attend linear(feature = elu1)",
}

GRAPHS = ("window(radius = 256)", "window and 16 globals", "causal")
"""Those that torch's own call can compute with a mask."""


RANKS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Settings:
    """The length, heads and calls of the times."""

    n: int = 6144
    calls: int = 3
    heads: int = 8
    key_heads: int = 2
    head_dim: int = 64


def measure(settings: Settings, ranks: int) -> list[Json]:
    """What so many processes find of each case; prints it as it is found."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.distributed", "--rank"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        arguments = [str(ranks), folder, json.dumps(asdict(settings))]
        processes = [
            subprocess.Popen([*command, str(rank), *arguments], env=environment)
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                if process.wait():
                    raise RuntimeError(f"a rank of {ranks} ended with {process.returncode}")
        finally:
            for process in processes:
                process.kill()
        found: list[Json] = json.loads((Path(folder) / "found.json").read_text())
        return found


# --- in the processes ----------------------------------------------------------------------------


def _rank(rank: int, ranks: int, folder: Path, settings: Settings) -> None:
    """What one process measures."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    found = []
    with torch.no_grad():
        for label in CASES:
            found.append(_case(label, mesh, settings))
            if rank == 0:
                print(json.dumps(found[-1]), flush=True)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _case(label: str, mesh: DeviceMesh, settings: Settings) -> dict[str, Json]:
    """One graph: seconds of a call, and of the same with every key gathered, at the slowest
    rank."""
    spec = attnspec.parse(f"attention a {{ {CASES[label]} }}")
    par = parallelize(spec.compile(), mesh)
    made = torch.Generator().manual_seed(0)
    n, size = settings.n, settings.head_dim
    local = [
        par.shard(torch.randn(1, heads, n, size, generator=made))
        for heads in (settings.heads, settings.key_heads, settings.key_heads)
    ]
    found = par(*local)
    received = par.bytes_received
    subjects: dict[str, Callable[[], torch.Tensor]] = {"seconds": lambda: par(*local)}
    if label in GRAPHS:
        gathered = _gathering(spec, par, local)
        assert torch.allclose(gathered(), found, atol=1e-4)
        subjects["seconds_gathering"] = gathered
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(settings.calls):
        for name, call in subjects.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            times[name].append(float(taken))
    most = torch.tensor(received)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    planned = par.plan(n)
    return {
        "case": label,
        "ranks": planned.ranks,
        "n": n,
        "partition": str(planned.partition),
        "how": planned.layers[0].how,
        "bytes_received": int(most),
        "bytes_planned": max(planned.bytes_received),
        "bytes_gathered": planned.bytes_gathered,
        **{name: median(each) for name, each in times.items()},
    }


def _gathering(spec: attnspec.Spec, par: Any, local: list[torch.Tensor]) -> Callable[[], Any]:
    """Own queries over all keys, which every rank is sent, by torch's own call."""
    q, k, v = local
    n = sum(each[0] for each in par.mesh.everyones([q.shape[2]], q.device))
    own = torch.from_numpy(par.partition_of(n).positions(par.mesh.rank))
    mask = torch.from_numpy(spec.mask(n))[own]

    def call() -> torch.Tensor:
        keys, values = par.unshard(k), par.unshard(v)
        return torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, enable_gqa=True
        )

    return call


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/distributed.json"))
    parser.add_argument("-n", type=int, default=Settings.n)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--anew", action="store_true", help="measure what the file has, too")
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank:
        rank, ranks, folder, settings = given.rank
        _rank(int(rank), int(ranks), Path(folder), Settings(**json.loads(settings)))
        return
    settings = Settings(n=given.n)
    kept = {} if given.anew else read(given.out)
    stored = kept.get("rows") if kept.get("settings") == asdict(settings) else None
    rows = dict(stored) if isinstance(stored, dict) else {}
    for ranks in given.ranks:
        if str(ranks) in rows:
            continue
        rows[str(ranks)] = [*measure(settings, ranks)]
        figures: dict[str, Json] = {
            "machine": machine(),
            "versions": versions(),
            "settings": asdict(settings),
            "rows": rows,
        }
        write(given.out, figures)


if __name__ == "__main__":
    main()
