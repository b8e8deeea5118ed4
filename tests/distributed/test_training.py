"""A model of transformers whose attention runs over four ranks is trained as in one process, and
the script of the benchmarks at lengths that mean nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks import distributed

STEPS = 3
RANKS = 4
N = 22


def trained(rank: int | None, folder: Path) -> list[float]:
    """The losses of a few steps, over the ranks or alone, and the norm of what was learned."""
    import torch
    import torch.distributed as dist
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    import attnspec
    from attnspec.distributed import parallelize

    torch.manual_seed(0)
    torch.set_num_threads(1)
    spec = attnspec.parse("attention a { causal attend window(radius = 6) | columns(first(2)) }")
    module = spec.compile()
    run: Any = module
    shard: Any = None
    if rank is not None:
        from torch.distributed.device_mesh import init_device_mesh

        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
        run = parallelize(module, init_device_mesh("cpu", (RANKS,)))
        shard = run.shard

    def attend(owner, query, key, value, mask, **rest):  # type: ignore[no-untyped-def]
        return run(query, key, value).transpose(1, 2), None

    AttentionInterface.register("over_ranks", attend)
    config = LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="over_ranks",
    )
    model = LlamaForCausalLM(config).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens = torch.randint(31, (2, N + 1))
    at = torch.arange(N)[None].expand(2, N)
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    if shard is not None:
        ids, labels, at = (shard(x, dim=1) for x in (ids, labels, at))
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=ids, position_ids=at, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="sum"
        ) / (2 * N)
        loss.backward()  # type: ignore[no-untyped-call]
        total = loss.detach().clone()
        if rank is not None:
            for each in (total, *(p.grad for p in model.parameters())):
                dist.all_reduce(each)
        optimizer.step()
        losses.append(float(total))
    learned = sum(float(p.detach().square().sum()) for p in model.parameters())
    if rank is not None:
        dist.destroy_process_group()
    return [*losses, learned]


@pytest.mark.slow
def test_a_model_over_ranks_learns_what_one_process_does(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent
    path = os.pathsep.join([str(root.parent), str(root)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with ExitStack() as stack:
        files = [stack.enter_context((tmp_path / f"errors{r}").open("w")) for r in range(RANKS)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, str(rank), str(tmp_path)],
                env=environment,
                stderr=file,
            )
            for rank, file in enumerate(files)
        ]
        ends = [process.wait(timeout=300) for process in processes]
    assert ends == [0] * RANKS, (tmp_path / "errors0").read_text()[-2000:]
    alone = trained(None, tmp_path)
    assert alone[STEPS - 1] < alone[0]
    for rank in range(RANKS):
        found = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert found == pytest.approx(alone, rel=1e-11)


@pytest.mark.slow
def test_the_script_measures_local_ranks_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    distributed.main(["-n", "96", "--ranks", "2", "--out", str(out)])
    first = json.loads(out.read_text())
    for row in first["rows"]["2"]:
        assert row["bytes_received"] == row["bytes_planned"]
        assert row["seconds"] > 0
    assert [row["case"] for row in first["rows"]["2"]] == [*distributed.CASES]
    distributed.main(["-n", "96", "--ranks", "2", "1", "--out", str(out)])
    both = json.loads(out.read_text())["rows"]
    assert set(both) == {"1", "2"}
    assert both["2"] == first["rows"]["2"]


if __name__ == "__main__":
    where = Path(sys.argv[2])
    said = trained(int(sys.argv[1]), where)
    (where / f"found{sys.argv[1]}.json").write_text(json.dumps(said))
