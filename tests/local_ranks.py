"""Calls whose positions lie over ranks, beside the same in one process; and ranks that are
processes: `run` starts one, which loads what all need and forks.
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from population import population, spec_of
from torch import Tensor
from views import Call, Case, errors, gradients, numbers, shares_keys

import attnspec
from attnspec.distributed import LostRank, Partition, parallelize

HERE = Path(__file__).parent
PACKAGE = Path(attnspec.__file__).parents[1]
WORLD = 4
LIMIT = 60.0

AXES = {"tokens": 1, "ids": 1, "numbers": 1, "choices": 2, "pairs": 2, "buckets": 3}
"""Along which axis inputs have positions."""


class Found(NamedTuple):
    """What one rank finds: the whole output, log-sum-exps if there are any and gradients of q, k
    and v and of inputs with a number of each pair; its share of gradients of what is learned; the
    bytes of rows that reached it, and as many as were planned."""

    whole: list[Tensor]
    learned: list[Tensor]
    received: int
    planned: int


def cut(name: str, n: int, ranks: int) -> Partition:
    """A partition by its name: equal parts as of `torch.chunk`, parts from both ends, residue
    classes modulo the ranks, or one in which two of four ranks have nothing and one a position."""
    each, (half, more) = max(1, -(-n // ranks)), divmod(n, 2 * ranks)
    ends = {
        "contiguous": [min(n, rank * each) for rank in range(ranks + 1)],
        "head_tail": [part * half + min(part, more) for part in range(2 * ranks + 1)],
        "uneven": [0, 0, 1, n, n],
    }
    if name == "residue":
        runs = tuple(((rank, n),) if rank < n else () for rank in range(ranks))
        return Partition(name, n, runs, ranks)
    parts = [((a, b),) if a < b else () for a, b in itertools.pairwise(ends[name])]
    if name == "head_tail":
        parts = [parts[rank] + parts[-1 - rank] for rank in range(ranks)]  # type: ignore[misc]
    return Partition(name, n, tuple(parts))


@dataclass(frozen=True)
class Shards:
    """A call of a spec, by its name in the population or its body, over the first ranks."""

    text: str
    n: int
    ranks: int
    partition: str = ""
    shape: str = "plain"
    dtype: torch.dtype = torch.float64
    layer: int = 0
    dtensor: bool = False

    @cached_property
    def call(self) -> Call:
        spec = population().get(self.text) or spec_of(self.text)
        return Call(Case(spec, self.n), self.shape, self.dtype, self.layer)

    @cached_property
    def tensors(self) -> list[Tensor]:
        q, k, v = self.call.tensors
        # keys that are the queries
        return [q, q.detach().clone() if shares_keys(self.call.case.spec) else k, v]

    @property
    def pairs(self) -> list[str]:
        """The inputs with a number of each pair."""
        return [x.name for x in self.call.case.spec.inputs.values() if x.kind == "pairs"]

    @property
    def where(self) -> Partition | None:
        """The partition of a name, None for the cheapest."""
        return cut(self.partition, self.n, self.ranks) if self.partition else None

    def module(self, dtype: torch.dtype, backend: str = "auto") -> Any:
        """With numbers in place of what is learned."""
        made = self.call.case.spec.compile(backend)
        made.make_parameters(self.tensors[0].shape[3], self.tensors[2].shape[3])
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(numbers(parameter.shape, 1))
        return made.to(torch.promote_types(dtype, torch.float32))

    def found(
        self,
        module: torch.nn.Module,
        dtype: torch.dtype,
        sums: bool,
        share: Callable[..., Any] = lambda x, dim: x,
        mesh: Any = None,
    ) -> list[Tensor]:
        """The output, log-sum-exps if they are asked for, gradients of q, k, v, of inputs with a
        number of each pair and of what is learned, of this share of the tensors."""
        leaves = [share(x.detach().to(dtype), 2).requires_grad_() for x in self.tensors]
        more = dict(self.call.keywords)
        if "key_padding_mask" in more:
            more["key_padding_mask"] = share(more["key_padding_mask"], 1)
        axes = {entry.name: AXES.get(entry.kind) for entry in self.call.case.spec.inputs.values()}
        if "inputs" in more:
            more["inputs"] = {
                name: x if axes[name] is None else share(x, axes[name])
                for name, x in more["inputs"].items()
            }
            for name in self.pairs:
                pairs = more["inputs"][name].to(dtype).requires_grad_()
                leaves.append(pairs)
                more["inputs"][name] = pairs
        args = [_placed(x, mesh, self.n) for x in leaves] if self.dtensor and mesh else leaves[:3]
        both = module(*args, **more, return_lse=sums)
        out, lse = (_local(x) for x in (both if sums else (both, None)))
        shape = (*self.tensors[0].shape[:3], self.tensors[2].shape[3])
        found = [out.detach(), torch.zeros(0) if lse is None else lse.detach()]
        found += gradients(out, lse, [*leaves, *module.parameters()], share(numbers(shape, 2), 2))
        with torch.no_grad():
            plain = _local(module(*args, **more))
        torch.testing.assert_close(plain, found[0], rtol=1e-2, atol=1e-2, equal_nan=True)
        return found

    @cached_property
    def has_sums(self) -> bool:
        """Whether one process gives log-sum-exps."""
        try:
            self.found(self.module(torch.float64), torch.float64, True)
        except ValueError as error:
            if "return_lse" not in str(error):
                raise
            return False
        return True

    def on(self, mesh: Any) -> Found:
        """What one rank finds."""
        module = self.module(self.dtype)
        par = parallelize(module, mesh, partition=self.where, timeout=LIMIT)
        try:
            found = self.found(par, self.dtype, True, par.shard, mesh)
        except ValueError as error:
            if "return_lse" not in str(error):
                raise
            found = self.found(par, self.dtype, False, par.shard, mesh)
        plan = par.plan(self.n, layer=self.layer)
        first = 5 + len(self.pairs)
        whole = [par.unshard(x) if x.dim() > 2 else x for x in found[:first]]
        planned = plan.bytes_received[mesh.get_local_rank()]
        return Found(whole, found[first:], par.bytes_received, planned)

    def differing(self, found: Sequence[Found]) -> list[str]:
        """In what ranks differ from one process, and from each other."""
        sums = found[0].whole[1].dim() > 1
        learned = [sum(shares) for shares in zip(*(each.learned for each in found), strict=True)]
        said = [*found[0].whole, *learned]
        meant = self.found(self.module(torch.float64), torch.float64, sums)
        rough = self.found(self.module(self.dtype), self.dtype, sums)
        wrong = errors(said, meant, rough)
        for rank, each in enumerate(found):
            if each.received != each.planned:
                wrong.append(f"rank {rank} got {each.received:,} bytes, planned {each.planned:,}")
            same = (torch.equal(*pair) for pair in zip(each.whole, found[0].whole, strict=True))
            if not all(same):
                wrong.append(f"rank {rank} has other shards than the first")
        return wrong


def _placed(x: Tensor, mesh: Any, n: int) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    whole = x.new_empty(*x.shape[:2], n, x.shape[3])
    size = whole.shape, whole.stride()
    return DTensor.from_local(x, mesh, [Shard(2)], run_check=False, shape=size[0], stride=size[1])


def _local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


# --- ranks that are processes --------------------------------------------------------------------


def run(calls: Sequence[Shards], folder: Path) -> tuple[list[list[Found]], list[list[list[str]]]]:
    """What each rank finds of each call, and then says of faults, from one start of processes."""
    torch.save([astuple(each) for each in calls], folder / "calls")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE.parent), str(HERE)]),
    }
    command = [sys.executable, "-W", "ignore", str(HERE / "local_ranks.py"), str(folder)]
    # what goes wrong before there are ranks is said by the first
    with (
        (folder / "errors0").open("w") as words,
        subprocess.Popen(command, env=environment, stderr=words, start_new_session=True) as process,
    ):
        try:
            process.wait(timeout=500)
        finally:
            # the ranks are a group of processes, which none outlives
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    files = [folder / f"errors{rank}" for rank in range(WORLD)]
    told = "\n".join(each.read_text()[-2000:] for each in files if each.exists())
    assert (folder / "calls0").exists(), told

    def said(what: str) -> list[list[Any]]:
        files = [folder / f"{what}{rank}" for rank in range(WORLD)]
        return [torch.load(x, weights_only=False) if x.exists() else [] for x in files]

    return [[Found(*x) for x in each] for each in said("calls")], said("faults")


def _calls(rank: int, folder: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    calls = [Shards(*each) for each in torch.load(folder / "calls", weights_only=False)]
    groups = {size: dist.new_group(list(range(size))) for size in (2, 3, 4)}
    meshes = {
        size: DeviceMesh.from_group(group, "cpu", mesh_dim_names=("cp",))
        for size, group in groups.items()
        if rank < size
    }
    found = [tuple(each.on(meshes[each.ranks])) for each in calls if rank < each.ranks]
    torch.save(found, folder / f"calls{rank}")
    dist.barrier()


def _faults(rank: int, folder: Path) -> None:
    """A rank with another spec, one that never comes, and one that ends before backward."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (WORLD,))
    modules = [spec_of(f"attend window(radius = {r})").compile() for r in (2, 3)]
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

    tell(modules[0])
    tell(modules[rank == 2])
    said.append(_hung(rank, folder, modules[0]))
    tell(modules[0], ends=True)
    tell(modules[0])
    torch.save(said, folder / f"faults{rank}")


def _hung(rank: int, folder: Path, module: Any) -> list[str]:
    """What a rank says of a call to which one that lives does not come until it has said so."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

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


LOADED = "torch._dynamo", "torch.distributed.tensor", "scipy.sparse.csgraph"
"""What every rank would load; forked, they have it from one process."""


def main(folder: Path) -> None:
    for name in LOADED:
        importlib.import_module(name)
    torch.set_num_threads(1)
    population()
    ranks = [os.fork() or _rank(rank, folder) for rank in range(WORLD)]
    for process in ranks:
        os.waitpid(process, 0)


def _rank(rank: int, folder: Path) -> NoReturn:
    """What one rank does; ends its process."""
    import torch.distributed as dist
    from reached import noting

    try:
        with (folder / f"errors{rank}").open("w") as words:
            os.dup2(words.fileno(), 2)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=WORLD,
            timeout=timedelta(seconds=LIMIT),
        )
        tell = noting()
        _calls(rank, folder)
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
