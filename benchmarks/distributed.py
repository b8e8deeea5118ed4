"""One sequence over several ranks: bytes on paper, and bytes and times over local processes.

`python -m benchmarks.distributed --paper` prints the table for 8 and 64 ranks at n = 1,048,576;
without it 1 to 4 local processes are started, each case is timed beside the same partition with
every key gathered, and the results are written as JSON. Times over processes of one machine say
what the exchange costs beside the work, not what a network does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import attnspec
from attnspec.distributed.cuts import count
from attnspec.distributed.exchange import exchange_of
from attnspec.distributed.partitions import contiguous
from attnspec.distributed.planning import ROWS, Tensors, plan
from attnspec.graphs.stack import Stack

LARGE = Tensors(1, 32, 8, 128, 128, 2)
N = 1 << 20

PAPER = {
    "window(before = 1023)": "causal attend window(before = 1023, after = 0)",
    "… with 4 sinks": "causal attend window(before = 1023, after = 0) | columns(first(4))",
    "Longformer, 256, 64 globals": "attend window(radius = 256) | global(first(64))",
    "BigBird, blocks of 64, r = 3": "attend block(size = 64, before = 1, after = 1)"
    " | global(first(64) | last(64)) | random_blocks(size = 64, blocks = 3, seed = 7)",
    "residue(step = 64)": "attend residue(step = 64)",
    "blocks of 8,192, causal": "causal attend block(size = 8192)",
    "causal": "causal attend full",
    "causal linear": "causal attend linear(feature = elu1)",
}

TIMED = {
    "window(radius = 256)": "attend window(radius = 256)",
    "window and 16 globals": "attend window(radius = 256) | global(first(16))",
    "causal": "causal attend full",
}


@dataclass(frozen=True)
class Settings:
    """Lengths, ranks and calls of the times."""

    n: int = 16384
    ranks: tuple[int, ...] = (1, 2, 4)
    calls: int = 5
    heads: int = 8
    head_dim: int = 64


def spec_of(body: str) -> attnspec.Spec:
    return attnspec.parse(f"attention a {{ {body} }}")


def paper(n: int = N, devices: Sequence[int] = (8, 64)) -> list[str]:
    """The table on paper, as lines of Markdown: the most bytes that reach a rank, forward."""
    lines = [
        "| graph | ranks | partition | travels | a rank gets | keys alone | gathering |",
        "|---|--:|---|---|--:|--:|--:|",
    ]
    for label, body in PAPER.items():
        for ranks in devices:
            found = plan(spec_of(body).program, n, ranks, LARGE)
            how = found.layers[0].how
            cells = [
                label,
                str(ranks),
                str(found.partition),
                how,
                _megabytes(max(found.bytes_received)),
                _megabytes(_keys_alone(body, n, ranks)) if how == ROWS else "",
                _megabytes(found.bytes_gathered),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _keys_alone(body: str, n: int, ranks: int) -> int:
    """The most bytes where keys travel and queries stay, over contiguous shards."""
    relation = Stack(spec_of(body).program).relation(n)
    rows = replace(LARGE.rows(32, 8, True), partial=None)
    found = exchange_of(relation, contiguous(n, ranks), rows)
    return (
        max(
            sum(count(found.keys(reader, owner)) for owner in range(ranks) if owner != reader)
            for reader in range(ranks)
        )
        * rows.key
    )


def _megabytes(number: int) -> str:
    return f"{number / 1e6:,.1f} MB"


def measure(settings: Settings) -> list[dict[str, object]]:
    """Bytes and seconds of each case over local processes."""
    found = []
    for ranks in settings.ranks:
        with tempfile.TemporaryDirectory() as folder:
            arguments = json.dumps([*vars(settings).values()])
            command = [sys.executable, "-m", "benchmarks.distributed", "--rank"]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes = [
                subprocess.Popen(
                    [*command, str(rank), str(ranks), folder, arguments], env=environment
                )
                for rank in range(ranks)
            ]
            for process in processes:
                if process.wait():
                    raise RuntimeError(f"a rank of {ranks} ended with {process.returncode}")
            found += json.loads((Path(folder) / "found.json").read_text())
    return found


def _rank(rank: int, ranks: int, folder: Path, settings: Settings) -> None:
    """What one process measures."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from attnspec.distributed import parallelize

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    shape = 1, settings.heads, settings.n, settings.head_dim
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    found = []
    for label, body in TIMED.items():
        par = parallelize(spec_of(body).compile(), mesh)
        local = [par.shard(x) for x in tensors]
        seconds = _timed(lambda par=par, local=local: par(*local), settings.calls)

        def gather(par: object = par, local: list[torch.Tensor] = local) -> None:
            for x in local[1:]:
                par.unshard(x)  # type: ignore[attr-defined]

        gathered = _timed(gather, settings.calls)
        planned = par.plan(settings.n)
        found.append(
            {
                "case": label,
                "ranks": ranks,
                "n": settings.n,
                "partition": str(planned.partition),
                "how": planned.layers[0].how,
                "bytes_received": max(planned.bytes_received),
                "bytes_gathered": planned.bytes_gathered,
                "seconds": seconds,
                "seconds_to_gather_keys": gathered,
            }
        )
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _timed(call: object, calls: int) -> float:
    times = []
    for _ in range(calls + 1):
        start = time.perf_counter()
        call()  # type: ignore[operator]
        times.append(time.perf_counter() - start)
    return median(times[1:])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paper", action="store_true", help="the table on paper alone")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/distributed.json"))
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank:
        n, ranks, calls, heads, size = json.loads(given.rank[3])
        settings = Settings(n, tuple(ranks), calls, heads, size)
        _rank(int(given.rank[0]), int(given.rank[1]), Path(given.rank[2]), settings)
    elif given.paper:
        print("\n".join(paper()))
    else:
        found = measure(Settings())
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
