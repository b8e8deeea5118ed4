"""What each of a few local processes runs: every case on two, three and all four ranks.

Started by `run`; rank 0 holds what the ranks find together against one process, and writes what
differs as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
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


def run(cases: Sequence[Case], folder: Path, script: str = "cases") -> list[dict[str, Any]]:
    """What each case said, from one start of four processes."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    root = str(HERE.parent.parent)
    path = os.pathsep.join([root, str(HERE.parent), str(HERE)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "ranks.py"), script, str(rank), str(folder)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"errors{rank}").open("w"),
        )
        for rank in range(WORLD)
    ]
    try:
        for process in processes:
            process.wait(timeout=500)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = [folder / f"said{rank}.json" for rank in range(WORLD)]
    errors = "\n".join((folder / f"errors{rank}").read_text()[-2000:] for rank in range(WORLD))
    assert said[0].exists() or script != "cases", errors
    return [json.loads(each.read_text()) if each.exists() else [] for each in said]


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
            break
    (folder / f"said{rank}.json").write_text(json.dumps(said))
    dist.barrier()


def _partition(case: Case) -> Any:
    from attnspec.distributed import partitions

    if not case.partition:
        return None
    name, _, number = case.partition.partition(" ")
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

    spec = (
        attnspec.parse(case.text, **case.settings)
        if case.text
        else attnspec.load(case.file, name=case.name, **case.settings)
    )
    torch.manual_seed(5)
    module = spec.compile(head_size=6).double()
    heads = spec.program.heads or case.heads
    ratio = case.heads // case.key_heads
    key_heads = heads // ratio if heads % ratio == 0 else heads
    n = case.n
    made = torch.Generator().manual_seed(n)
    shapes = [(2, heads, n, 6), (2, key_heads, n, 6), (2, key_heads, n, 6)]
    whole = [torch.randn(*s, generator=made, dtype=torch.float64) for s in shapes]
    weight = torch.randn(2, heads, n, 6, generator=made, dtype=torch.float64)
    given = {name: torch.as_tensor(x)[None].expand(2, *torch.as_tensor(x).shape).contiguous() for name, x in sample(spec, n).items()}
    padding = torch.rand(2, n, generator=made) > 0.3 if case.padding else None
    par = parallelize(module, mesh, partition=_partition(case), timeout=LIMIT)
    local = [par.shard(x).requires_grad_() for x in whole]
    from attnspec.distributed.parallel import AXES

    axes = {entry.name: AXES.get(entry.kind) for entry in spec.program.inputs}
    shards = {
        name: x if axes[name] is None else par.shard(x, dim=axes[name]) for name, x in given.items()
    }
    options: dict[str, Any] = {"layer": case.layer, "return_lse": case.lse}
    args = local
    if case.dtensor:
        from torch.distributed.tensor import DTensor, Shard

        args = [
            DTensor.from_local(x, mesh, [Shard(2)], run_check=False, shape=w.shape, stride=w.stride())
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
    tables = [p.grad if p.grad is not None else torch.zeros_like(p) for p in module.parameters()]
    for table in tables:
        torch.distributed.all_reduce(table, group=mesh.get_group())
    together = [par.unshard(x.detach()) for x in (out, *(x.grad for x in local))]
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
    module.zero_grad()
    q, k, v = (x.clone().requires_grad_() for x in whole)
    found = module(q, k, v, key_padding_mask=padding, inputs=given, **options)
    out, lse = found if case.lse else (found, None)
    loss = (out * weight).sum()
    if lse is not None:
        loss = loss + torch.where(lse > -torch.inf, lse, 0.0).sum()
    loss.backward()
    wanted = [out.detach(), q.grad, k.grad, v.grad]
    if lse is not None:
        wanted.append(lse.detach())
    wanted += [p.grad if p.grad is not None else torch.zeros_like(p) for p in module.parameters()]
    together += tables
    answer["apart"] = [_apart(a, b) for a, b in zip(together, wanted, strict=True)]
    return answer


def _apart(a: Any, b: Any) -> float:
    import torch

    if a.shape != b.shape:
        return float("inf")
    same = (a == b) | (torch.isinf(a) & torch.isinf(b) & (a == b))
    apart = torch.where(same, 0.0, (a - b).abs() / (1 + b.abs().amax() if b.numel() else 1))
    found = float(apart.max()) if apart.numel() else 0.0
    return found if found == found else float("inf")


def main() -> None:
    import torch
    import torch.distributed as dist

    script, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=LIMIT),
    )
    globals()[f"_{script}"](rank, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
