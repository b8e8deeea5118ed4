"""What each of a few local processes runs: every case on two, three and all four ranks.

`run` starts one process, which loads what all need and forks; rank 0 holds what the ranks find
together against one process, and writes what differs as JSON.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).parent
WORLD = 4
LIMIT = 60.0


@dataclass
class Case:
    """One spec at one length, and then at `more`, over the first `ranks` processes; `text` or the
    name of a file. `kind` is the type of the tensors, `grad` names those that are differentiated,
    `within` is how far from one process is near enough. `lists` are heads that have lists of
    choices of their own, 0 for lists that are alike."""

    n: int
    ranks: int
    text: str = ""
    file: str = ""
    name: str | None = None
    settings: dict[str, int] = field(default_factory=dict)
    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    partition: str = ""
    padding: bool = False
    lse: bool = False
    layer: int = 0
    dtensor: bool = False
    more: list[int] = field(default_factory=list)
    kind: str = "float64"
    autocast: bool = False
    grad: str = "qkv"
    dropout: float = 0.0
    within: float = 1e-12
    lists: int = 0

    @property
    def label(self) -> str:
        what = Path(self.file).stem if self.file else " ".join(self.text.split())
        return f"{what} {self.name or ''} n={self.n} ranks={self.ranks} {self.partition}"


def run(cases: Sequence[Case], folder: Path) -> tuple[list[list[Any]], list[list[Any]]]:
    """What each rank said of each case, and then of faults, from one start of four processes."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    root = str(HERE.parent)
    path = os.pathsep.join([root, str(HERE)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "ignore", str(HERE / "local_ranks.py"), str(folder)]
    # what goes wrong before there are ranks is said by the first
    with (
        (folder / "errors0").open("w") as errors,
        subprocess.Popen(
            command, env=environment, stderr=errors, start_new_session=True
        ) as process,
    ):
        try:
            process.wait(timeout=500)
        finally:
            # the ranks are a group of processes, which none outlives
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    files = [folder / f"errors{rank}" for rank in range(WORLD)]
    told = "\n".join(each.read_text()[-2000:] for each in files if each.exists())
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
            said.append(tried(case, meshes[case.ranks], rank))
        except Exception as error:
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


def tried(case: Case, mesh: Any, rank: int) -> dict[str, Any]:
    """How far the ranks' outputs and gradients are from one process, and bytes as they were planned
    and counted, of one length after the other."""
    import torch

    import attnspec
    from attnspec.distributed import parallelize

    spec = (
        attnspec.parse(case.text)
        if case.text
        else attnspec.load(case.file, name=case.name, parameters=case.settings)
    )
    torch.manual_seed(5)
    module = spec.compile(head_size=6)
    module = module.double() if case.kind == "float64" else module
    # a call of training may move what is kept
    alone = copy.deepcopy(module)
    par = parallelize(module, mesh, partition=_partition(case), timeout=LIMIT)
    each = [_at_length(case, spec, (par, alone), n, rank) for n in (case.n, *case.more)]
    lists = "how", "received", "planned", "apart"
    return {**each[-1], **{name: [x for one in each for x in one[name]] for name in lists}}


def _at_length(
    case: Case, spec: Any, modules: tuple[Any, Any], n: int, rank: int
) -> dict[str, Any]:
    """One call over the ranks beside one in this process."""
    import torch

    from attnspec.distributed import partitions
    from attnspec.distributed.collectives import gathered

    (par, alone), kind = modules, getattr(torch, case.kind)
    made = torch.Generator().manual_seed(n)
    whole = _tensors(case, spec, n, made)
    weight = torch.randn(whole[0].shape, generator=made, dtype=torch.float64).to(kind)
    given = _inputs(case, spec, n) | drawn_lists(spec, n, case.lists)
    padding = drawn_padding(case.batch, n) if case.padding else None
    local = [
        par.shard(x).requires_grad_(name in case.grad) for name, x in zip("qkv", whole, strict=True)
    ]
    options: dict[str, Any] = {"layer": case.layer, "return_lse": case.lse}
    if case.dropout:
        options["dropout_p"] = case.dropout
        torch.manual_seed(100 + rank)
    with _modes(case):
        out, lse = _over_ranks(case, par, whole, local, padding, given, options)
    plan, received = par.plan(n, layer=case.layer), par.bytes_received
    if case.grad:
        _loss(out, par.shard(weight), lse).backward()
    ones = partitions.contiguous(par.mesh.ranks, par.mesh.ranks)
    shares = [_gradient(p)[None] for p in par.module.parameters()]
    tables = [gathered(par.mesh, ones, each, 0).sum(0) for each in shares]
    together = [par.unshard(x.detach()) for x in (out, *(_gradient(x) for x in local))]
    if lse is not None:
        together.append(par.unshard(lse.detach()))
    par.module.zero_grad()
    answer = {
        "case": case.label,
        "how": [layer.how for layer in plan.layers],
        "partition": str(plan.partition),
        "received": [received],
        "planned": [plan.bytes_received[rank] + _sums(case, plan, rank) if case.batch else 0],
        "apart": [],
        "within": case.within,
    }
    if rank:
        return answer
    if case.dropout:
        # whatever is dropped, outputs are linear in values, and so backward has the same mask
        sums = (together[0] * weight).sum(), (together[3] * whole[2]).sum()
        dropped = float(((together[0] == 0).all(-1)).float().mean())
        return {**answer, "apart": [_apart(*sums), 0.0 if dropped < 0.9 else 1.0]}
    parts = [x.clone().requires_grad_(x_.requires_grad) for x, x_ in zip(whole, local, strict=True)]
    with _modes(case):
        found = alone(*parts, key_padding_mask=padding, inputs=given, **options)
    out, lse = found if case.lse else (found, None)
    if case.grad:
        _loss(out, weight, lse).backward()
    wanted = [out.detach(), *(_gradient(x) for x in parts)]
    if lse is not None:
        wanted.append(lse.detach())
    wanted += [_gradient(p) for p in alone.parameters()]
    alone.zero_grad()
    pairs = zip([*together, *tables], wanted, strict=True)
    return {**answer, "apart": [_apart(a, b) for a, b in pairs]}


def _sums(case: Case, plan: Any, rank: int) -> int:
    """The bytes of log-sum-exps of heads elsewhere, which a call may ask for and no plan counts;
    heads go with their key heads, as even as these allow."""
    ways = [layer.how for layer in plan.layers]
    if not case.lse or ways != ["heads"]:
        return 0
    heads, keys = plan.tensors.heads, plan.tensors.key_heads
    ends = [at * keys // case.ranks * (heads // keys) for at in (rank, rank + 1)]
    positions = plan.partition.lengths[rank]
    return int(case.batch * (heads - (ends[1] - ends[0])) * positions * 8)


def _tensors(case: Case, spec: Any, n: int, made: Any) -> list[Any]:
    """Whole q, k and v."""
    import torch

    from attnspec.graphs.patterns import BY_NAME
    from attnspec.lower.lower import decided_leaves, shares_keys

    heads = spec.program.heads or case.heads
    ratio = case.heads // case.key_heads
    key_heads = heads // ratio if heads % ratio == 0 else heads
    decided = [BY_NAME[leaf.pattern] for leaf in decided_leaves(spec.program)]
    if not case.lists and not all(getattr(each, "by_inputs", False) for each in decided):
        key_heads = heads
    shapes = [(case.batch, count, n, 6) for count in (heads, key_heads, key_heads)]
    whole = [torch.randn(*s, generator=made, dtype=torch.float64) for s in shapes]
    if any(shares_keys(attend.graph) for attend in spec.program.attends):
        whole[1] = whole[0].clone()
    return [x.to(getattr(torch, case.kind)) for x in whole]


def _inputs(case: Case, spec: Any, n: int) -> dict[str, Any]:
    """Whole run-time inputs, alike for all samples."""
    import torch
    from zoo import sample

    return {
        name: torch.as_tensor(x)[None].expand(case.batch, *torch.as_tensor(x).shape).contiguous()
        for name, x in sample(spec, n).items()
    }


def drawn_padding(batch: int, n: int) -> Any:
    """Which keys of samples are real, bool [batch, n]: some seven of ten."""
    import torch

    return torch.rand(batch, n, generator=torch.Generator().manual_seed(n + 1)) > 0.3


def drawn_lists(spec: Any, n: int, heads: int) -> dict[str, Any]:
    """Lists of choices of two samples and so many heads: blocks near the query, of a third of them
    none, and some twice."""
    import torch

    made, found = torch.Generator().manual_seed(n + heads), {}
    for entry in spec.program.inputs if heads else ():
        if entry.kind == "choices":
            size = entry.size or 1
            blocks = -(-n // size)
            near = torch.arange(n)[:, None] // size
            drawn = near + torch.randint(-3, 4, (2, heads, n, 4), generator=made)
            drawn[torch.rand(drawn.shape, generator=made) < 1 / 3] = -1
            found[entry.name] = drawn.clamp(-1, blocks - 1)
        elif entry.kind == "scores":
            blocks = -(-n // entry.size)
            found[entry.name] = torch.randn(2, heads, n, blocks, generator=made)
    return found


@contextmanager
def _modes(case: Case) -> Iterator[None]:
    """No gradients, or autocast, as a case says."""
    import torch

    with (
        torch.set_grad_enabled(bool(case.grad)),
        torch.autocast("cpu", torch.bfloat16, enabled=case.autocast),
    ):
        yield


def _over_ranks(
    case: Case,
    par: Any,
    whole: Sequence[Any],
    local: Sequence[Any],
    padding: Any,
    given: dict[str, Any],
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """The output of this rank and its log-sum-exps, None where they are not asked for."""
    from attnspec.ir.program import POSITIONS

    axes = {entry.name: POSITIONS.get(entry.kind) for entry in par.module.program.inputs}
    shards = {
        name: x if (axis := axes[name]) is None else par.shard(x, axis) for name, x in given.items()
    }
    args = list(local)
    if case.dtensor:
        from torch.distributed.tensor import DTensor, Shard

        mesh = par.device_mesh
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
    out, lse = found if case.lse else (found, None)
    return (out.to_local() if case.dtensor else out), lse


def _loss(out: Any, weight: Any, lse: Any) -> Any:
    import torch

    loss = (out.to(weight.dtype) * weight).sum()
    return loss if lse is None else loss + torch.where(lse > -torch.inf, lse, 0.0).sum()


def _gradient(x: Any) -> Any:
    return x.new_zeros(x.shape) if x.grad is None else x.grad


def _apart(a: Any, b: Any) -> float:
    import torch

    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return float("inf")
    a, b = a.double(), b.double()
    same = (a == b) | (torch.isinf(a) & torch.isinf(b) & (a == b))
    apart = torch.where(same, 0.0, (a - b).abs() / (1 + b.abs().amax() if b.numel() else 1))
    found = float(apart.max()) if apart.numel() else 0.0
    return found if found == found else float("inf")


def _faults(rank: int, folder: Path) -> None:
    """A rank with another spec, then one that lives and does not come; at last one that ends
    between forward and backward: what the others say then, and in another call."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    import attnspec
    from attnspec.distributed import parallelize

    mesh = init_device_mesh("cpu", (WORLD,))
    specs = [
        attnspec.parse(f"attention a {{ attend window(radius = {r}) }}").compile() for r in (2, 3)
    ]
    said = []

    def tell(module: Any, ends: bool = False) -> None:
        par = parallelize(module, mesh, timeout=10.0)
        x = torch.ones(1, 1, 3, 4, requires_grad=ends)
        try:
            out = par(x, x, torch.ones(1, 1, 3, 4))
            if ends and rank == 1:
                os._exit(0)
            if ends:
                out.sum().backward()
            said.append(["none", ""])
        except Exception as error:
            said.append([type(error).__name__, str(error)])

    tell(specs[0])
    tell(specs[rank == 2])
    said.append(_hung(rank, folder, specs[0]))
    tell(specs[0], ends=True)
    tell(specs[0])
    (folder / f"faults{rank}.json").write_text(json.dumps(said))


def _hung(rank: int, folder: Path, module: Any) -> list[str]:
    """What a rank says of a call to which one that lives does not come until it has said so."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from attnspec.distributed import LostRank, parallelize

    # connections in which somebody waited too long are of no more use
    group = dist.new_group(list(range(WORLD)))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
    par = parallelize(module, mesh, timeout=1.0)
    told = [folder / f"hung{other}" for other in range(WORLD) if other != 2]
    if rank == 2:
        end = time.monotonic() + LIMIT
        while not all(each.exists() for each in told) and time.monotonic() < end:
            time.sleep(0.02)
        return ["told" if all(each.exists() for each in told) else "none", ""]
    x = torch.ones(1, 1, 3, 4)
    try:
        par(x, x, x)
    except LostRank as error:
        (folder / f"hung{rank}").touch()
        return ["LostRank", str(error)]
    return ["none", ""]


LOADED = (
    "torch._dynamo",
    "torch.distributed.tensor",
    "scipy.sparse.csgraph",
    "attnspec.compile.compiler",
    "attnspec.distributed.parallel",
    "zoo",
)
"""What every rank would load; forked, they have it from one process."""


def main(folder: Path) -> None:
    for name in LOADED:
        importlib.import_module(name)
    torch = sys.modules["torch"]
    torch.set_num_threads(1)
    ranks = [os.fork() or _rank(rank, folder) for rank in range(WORLD)]
    for process in ranks:
        os.waitpid(process, 0)


def _rank(rank: int, folder: Path) -> NoReturn:
    """What one rank does; ends its process."""
    import torch.distributed as dist
    from noted import noting

    try:
        with (folder / f"errors{rank}").open("w") as errors:
            os.dup2(errors.fileno(), 2)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=WORLD,
            timeout=timedelta(seconds=LIMIT),
        )
        tell = noting()
        _cases(rank, folder)
        tell()
        _faults(rank, folder)
        tell()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
