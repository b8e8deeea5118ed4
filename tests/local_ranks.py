"""What each of a few local processes runs: every case on two, three and all four ranks.

Started by `run`; rank 0 holds what the ranks find together against one process, and writes what
differs as JSON.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORLD = 4
LIMIT = 60.0


@dataclass
class Case:
    """One spec at one length over the first `ranks` processes; `text` or the name of a file."""

    n: int
    ranks: int
    text: str = ""
    file: str = ""
    name: str | None = None
    settings: dict[str, int] = field(default_factory=dict)
    heads: int = 4
    key_heads: int = 2
    partition: str = ""
    padding: bool = False
    lse: bool = False
    layer: int = 0
    rows_alone: bool = False
    dtensor: bool = False

    @property
    def label(self) -> str:
        what = self.file or self.text
        return f"{what} {self.name or ''} n={self.n} ranks={self.ranks} {self.partition}"


def run(cases: Sequence[Case], folder: Path) -> tuple[list[list[Any]], list[list[Any]]]:
    """What each rank said of each case, and then of faults, from one start of four processes."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    root = str(HERE.parent)
    path = os.pathsep.join([root, str(HERE)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", str(HERE / "local_ranks.py")]
    with ExitStack() as files:
        errors = [files.enter_context((folder / f"errors{r}").open("w")) for r in range(WORLD)]
        processes = [
            subprocess.Popen([*command, str(rank), str(folder)], env=environment, stderr=file)
            for rank, file in enumerate(errors)
        ]
        try:
            for process in processes:
                process.wait(timeout=500)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    told = "\n".join((folder / f"errors{rank}").read_text()[-2000:] for rank in range(WORLD))
    assert (folder / "cases0.json").exists(), told

    def said(what: str) -> list[list[Any]]:
        files = [folder / f"{what}{rank}.json" for rank in range(WORLD)]
        return [json.loads(each.read_text()) if each.exists() else [] for each in files]

    return said("cases"), said("faults")


# --- in the processes ----------------------------------------------------------------------------


def _cases(rank: int, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    cases = [Case(**each) for each in json.loads((folder / "cases.json").read_text())]
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    meshes = {
        size: DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        for size, group in groups.items()
        if rank < size
    }
    said = []
    for case in cases:
        if rank >= case.ranks:
            continue
        try:
            said.append(_tried(case, meshes[case.ranks], rank))
        except Exception as error:
            import traceback

            said.append({"case": case.label, "error": repr(error), "trace": traceback.format_exc()})
    (folder / f"cases{rank}.json").write_text(json.dumps(said))
    dist.barrier()


def _partition(case: Case) -> Any:
    from attnspec.distributed import partitions

    if not case.partition:
        return None
    name, _, number = case.partition.partition(" ")
    if name == "uneven":
        # of four ranks two have nothing, and one a single position
        ends = 0, 0, 1, case.n, case.n
        runs = tuple(((a, b),) if a < b else () for a, b in itertools.pairwise(ends))
        return partitions.Partition("uneven", case.n, runs)
    if name == "residue":
        return partitions.by_residue(case.n, case.ranks, int(number))
    return getattr(partitions, name)(case.n, case.ranks)


def _tried(case: Case, mesh: Any, rank: int) -> dict[str, Any]:
    """How far the ranks' outputs and gradients are from one process, and bytes as they were planned
    and counted."""
    import torch
    from zoo import sample

    import attnspec
    from attnspec.distributed import parallelize
    from attnspec.lower.lower import decided_leaves, shares_keys

    spec = (
        attnspec.parse(case.text)
        if case.text
        else attnspec.load(case.file, name=case.name, **case.settings)
    )
    torch.manual_seed(5)
    module = spec.compile(head_size=6).double()
    # a call of training may move what is kept
    alone = copy.deepcopy(module)
    heads = spec.program.heads or case.heads
    ratio = case.heads // case.key_heads
    key_heads = heads // ratio if heads % ratio == 0 else heads
    if decided_leaves(spec.program):
        key_heads = heads
    n = case.n
    made = torch.Generator().manual_seed(n)
    shapes = [(2, heads, n, 6), (2, key_heads, n, 6), (2, key_heads, n, 6)]
    whole = [torch.randn(*s, generator=made, dtype=torch.float64) for s in shapes]
    if any(shares_keys(attend.graph) for attend in spec.program.attends):
        whole[1] = whole[0].clone()
    weight = torch.randn(2, heads, n, 6, generator=made, dtype=torch.float64)
    given = {
        name: torch.as_tensor(x)[None].expand(2, *torch.as_tensor(x).shape).contiguous()
        for name, x in sample(spec, n).items()
    }
    padding = torch.rand(2, n, generator=made) > 0.3 if case.padding else None
    par = parallelize(module, mesh, partition=_partition(case), timeout=LIMIT)
    local = [par.shard(x).requires_grad_() for x in whole]
    from attnspec.distributed.parallel import AXES

    axes = {entry.name: AXES.get(entry.kind) for entry in spec.program.inputs}
    shards = {
        name: x if (axis := axes[name]) is None else par.shard(x, axis) for name, x in given.items()
    }
    options: dict[str, Any] = {"layer": case.layer, "return_lse": case.lse}
    args = local
    if case.dtensor:
        from torch.distributed.tensor import DTensor, Shard

        args = [
            DTensor.from_local(
                x, mesh, [Shard(2)], run_check=False, shape=w.shape, stride=w.stride()
            )
            for x, w in zip(local, whole, strict=True)
        ]
    found = par(
        *args,
        key_padding_mask=None if padding is None else par.shard(padding, dim=1),
        inputs=shards,
        **options,
    )
    plan = par.plan(n, layer=case.layer)
    received = par.bytes_received
    out, lse = found if case.lse else (found, None)
    if case.dtensor:
        out = out.to_local()
    loss = (out * par.shard(weight)).sum()
    if lse is not None:
        loss = loss + torch.where(lse > -torch.inf, lse, 0.0).sum()
    loss.backward()
    tables = [_gradient(p) for p in module.parameters()]
    for table in tables:
        torch.distributed.all_reduce(table, group=mesh.get_group())
    together = [par.unshard(x.detach()) for x in (out, *(_gradient(x) for x in local))]
    if lse is not None:
        together.append(par.unshard(lse.detach()))
    answer = {
        "case": case.label,
        "how": [layer.how for layer in plan.layers],
        "partition": str(plan.partition),
        "received": received,
        "planned": plan.bytes_received[rank],
        "gathered": plan.bytes_gathered,
    }
    if rank:
        return answer
    q, k, v = (x.clone().requires_grad_() for x in whole)
    found = alone(q, k, v, key_padding_mask=padding, inputs=given, **options)
    out, lse = found if case.lse else (found, None)
    loss = (out * weight).sum()
    if lse is not None:
        loss = loss + torch.where(lse > -torch.inf, lse, 0.0).sum()
    loss.backward()
    wanted = [out.detach(), *(_gradient(x) for x in (q, k, v))]
    if lse is not None:
        wanted.append(lse.detach())
    wanted += [_gradient(p) for p in alone.parameters()]
    together += tables
    answer["apart"] = [_apart(a, b) for a, b in zip(together, wanted, strict=True)]
    return answer


def _gradient(x: Any) -> Any:
    return x.new_zeros(x.shape) if x.grad is None else x.grad


def _apart(a: Any, b: Any) -> float:
    import torch

    if a.shape != b.shape:
        return float("inf")
    same = (a == b) | (torch.isinf(a) & torch.isinf(b) & (a == b))
    apart = torch.where(same, 0.0, (a - b).abs() / (1 + b.abs().amax() if b.numel() else 1))
    found = float(apart.max()) if apart.numel() else 0.0
    return found if found == found else float("inf")


def _faults(rank: int, folder: Path) -> None:
    """A rank with another spec, then one with other shards and one with tensors that do not fit,
    then one that ends: what the others say."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    import attnspec
    from attnspec.distributed import parallelize

    mesh = init_device_mesh("cpu", (WORLD,))
    specs = [
        attnspec.parse(f"attention a {{ attend window(radius = {r}) }}").compile() for r in (2, 3)
    ]
    said = []

    def tell(module: Any, rows: int, size: int = 4) -> None:
        par = parallelize(module, mesh, timeout=10.0)
        x = torch.ones(1, 1, rows, 4)
        try:
            par(x, x, torch.ones(1, 1, rows, size))
            said.append(["none", ""])
        except Exception as error:
            said.append([type(error).__name__, str(error)])

    tell(specs[0], 3)
    tell(specs[rank == 2], 3)
    tell(specs[0], 3 + (rank == 1))
    tell(specs[0], 3, 0 if rank == 3 else 4)
    if rank == 1:
        os._exit(0)
    tell(specs[0], 3)
    (folder / f"faults{rank}.json").write_text(json.dumps(said))
    os._exit(0)


def main() -> None:
    import torch
    import torch.distributed as dist

    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=LIMIT),
    )
    _cases(rank, folder)
    _faults(rank, folder)


if __name__ == "__main__":
    main()
