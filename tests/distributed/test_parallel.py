"""A sequence over local processes is what one computes: values, gradients, bytes, errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_ranks import run
from rank_cases import NETWORK, WINDOW, check
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import attnspec
from attnspec.distributed import parallel
from attnspec.distributed.collectives import Mesh
from attnspec.distributed.parallel import _random_state, parallelize
from attnspec.distributed.partitions import Partition
from attnspec.distributed.regions import Region

# the processes that the tests share start once
pytestmark = pytest.mark.xdist_group("ranks")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Any]], list[list[Any]]]:
    """What one start of four processes says."""
    return run(NETWORK, tmp_path_factory.mktemp("ranks"))


def test_one_worker_runs_what_shares_processes(request: pytest.FixtureRequest) -> None:
    # groups are a suffix of the names, which not every pytest lets be changed
    if getattr(request.config.option, "loadgroup", False):
        assert request.node.nodeid.endswith("@ranks")


def test_ranks_together_compute_what_one_process_does(
    ran: tuple[list[list[Any]], list[list[Any]]],
) -> None:
    said, _ = ran
    check(said, NETWORK)
    ways = {how for answer in said[0] for how in answer["how"]}
    assert ways == {"rows", "states", "heads", "all"}


def test_every_rank_says_what_is_wrong(ran: tuple[list[list[Any]], list[list[Any]]]) -> None:
    _, said = ran
    assert [bool(each) for each in said] == [True, False, True, True]
    for rank in (0, 2, 3):
        fine, spec, hung, behind, lost = said[rank]
        assert fine == ["none", ""]
        assert spec[0] == "ValueError"
        assert "the spec must be the same on every rank" in spec[1]
        # one that lives and sleeps until all others have told
        assert hung[0] == ("told" if rank == 2 else "LostRank"), hung
        assert behind[0] == lost[0] == "LostRank"


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A mesh of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_lengths_axes_and_tensors_that_do_not_fit_are_refused(alone: DeviceMesh) -> None:
    attention = parallelize(attnspec.parse(WINDOW).compile(), alone)
    x: Any = torch.randn(1, 1, 6, 2)
    for dim in (2, -2):
        assert torch.equal(attention.unshard(attention.shard(x, dim), dim), x)
    wrong: Any
    for wrong, error, words in (
        (-1, ValueError, "n must be between 0 and"),
        ("3", TypeError, "`?n`? must be an integer"),
    ):
        with pytest.raises(error, match=words):
            attention.plan(wrong)
    for cut in (attention.shard, attention.unshard):
        with pytest.raises(ValueError, match=r"dim must be an axis of .*\[1, 1, 6, 2\], got 9"):
            cut(x, 9)
        with pytest.raises(TypeError, match="a tensor is needed, got list"):
            cut([1])  # type: ignore[arg-type]


def test_tensors_over_devices_that_are_not_cut_along_positions_are_refused(
    alone: DeviceMesh,
) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    attention = parallelize(attnspec.parse(WINDOW).compile(), alone)
    x: Any = torch.randn(1, 1, 6, 2)
    right = DTensor.from_local(x, alone, [Shard(2)])
    assert torch.equal(attention(right, right, right).to_local(), attention(x, x, x))
    for each in (x, *(DTensor.from_local(x, alone, [way]) for way in (Replicate(), Shard(1)))):
        with pytest.raises(ValueError, match=r"on this mesh and placed by Shard\(2\)"):
            attention(right, each, right)


def test_own_keys_are_weighed_while_rows_travel_and_a_plan_is_compared_once(
    alone: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []

    def noting(owner: Any, name: str, word: str) -> None:
        whole = getattr(owner, name)

        def called(*args: Any, **more: Any) -> Any:
            noted.append(word)
            return whole(*args, **more)

        monkeypatch.setattr(owner, name, called)

    noting(Mesh, "swap", "send")
    noting(Mesh, "finish", "wait")
    noting(Region, "partial", "weigh")
    noting(parallel, "plan", "plan")
    attention = parallelize(attnspec.parse(WINDOW).compile(), alone)
    x = torch.randn(1, 2, 9, 4)
    calls = []
    for _ in range(2):
        noted.clear()
        attention(x, x, x)
        calls.append(noted.copy())
    rows, answers = ["send", "weigh", "wait"], ["send", "wait"]
    said, partition, planned = ["send", "wait"], ["plan"], ["plan"]
    # what ranks say of the call, and once what they planned
    assert calls[0] == [*said, *partition, *planned, *said, *rows, *answers]
    assert calls[1] == [*said, *rows, *answers]


def test_a_layer_turns_positions_as_the_whole_sequence_has_them(alone: DeviceMesh) -> None:
    turned = Partition("turned", 7, (((4, 7), (0, 4)),))
    spec = attnspec.parse("attention a { causal attend window(before = 2, after = 0) }")

    def rotary(
        q: torch.Tensor, k: torch.Tensor, at: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angle = at[:, None] / 3.0
        return q * angle.cos(), k * angle.cos()

    layer: Any = attnspec.SelfAttention(spec, 8, 2, rotary=rotary)
    x = torch.randn(2, 7, 8)
    whole = layer(x)
    layer.attention = run = parallelize(layer.attention, alone, partition=turned)
    shard = run.shard(x, dim=1)
    assert torch.equal(shard, x[:, [4, 5, 6, 0, 1, 2, 3]])
    torch.testing.assert_close(run.unshard(layer(shard), dim=1), whole)


def test_what_is_no_module_or_partition_is_refused(alone: DeviceMesh) -> None:
    wrong: Any
    spec = attnspec.parse("attention a { extra_tokens 2 attend window(radius = 2) }")
    layer: Any = attnspec.SelfAttention(spec, 8, 2)
    for wrong in (spec, layer):
        with pytest.raises(TypeError, match=r"`spec.compile\(\)`, got .*`layer.attention`"):
            parallelize(wrong, alone)
    wrong = "contiguous"
    with pytest.raises(TypeError, match="partition must be that of a plan"):
        parallelize(layer.attention, alone, partition=wrong)
    two = Partition("two", 4, (((0, 2),), ((2, 4),)))
    with pytest.raises(ValueError, match="the partition is one of 2 ranks, the mesh has 1"):
        parallelize(layer.attention, alone, partition=two)
    both: Any = attnspec.MultiheadAttention(8, 2, spec=attnspec.parse(WINDOW), batch_first=True)
    x = torch.randn(1, 6, 8)
    whole, _ = both(x, x, x, need_weights=False)
    both.attention = parallelize(both.attention, alone)
    torch.testing.assert_close(both(x, x, x, need_weights=False)[0], whole)
    for more in ({}, {"need_weights": False, "attn_mask": torch.zeros(6, 6, dtype=torch.bool)}):
        with pytest.raises(ValueError, match="a rank has a shard of the sequence"):
            both(x, x, x, **more)
    layer.attention = parallelize(layer.attention, alone)
    with pytest.raises(ValueError, match="has extra tokens, which stand before the whole"):
        layer(torch.randn(1, 6, 8))


def test_numbers_at_padding_are_never_read(alone: DeviceMesh) -> None:
    text = "attention a { input t: numbers attend where(6 / t(k) >= 3) | self }"
    module = attnspec.parse(text).compile()
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    given: Any = {
        "key_padding_mask": torch.tensor([[True, True, True, False, True]]),
        "inputs": {"t": torch.tensor([[1, 2, 3, 0, 6]])},
    }
    found = parallelize(module, alone)(x, x, x, **given)
    assert (found - module(x, x, x, **given)).abs().max() < 1e-12


def test_inputs_keep_their_promise(alone: DeviceMesh) -> None:
    text = "attention a { input t: tokens(at_most = 1) attend columns(t) | self }"
    attention = parallelize(attnspec.parse(text).compile(), alone)
    x = torch.randn(1, 2, 5, 4)
    with pytest.raises(ValueError, match="promises at most 1"):
        attention(x, x, x, inputs={"t": torch.tensor([[True, True, False, False, False]])})


@pytest.mark.parametrize("graph", ["window(radius = 1)", "full", "linear()", "topk(keys = 2)"])
def test_numbers_are_looked_at_if_that_is_asked_for(alone: DeviceMesh, graph: str) -> None:
    module = attnspec.parse(f"attention a {{ attend {graph} }}").compile(check_finite=True)
    x = torch.randn(1, 2, 5, 4, dtype=torch.float64)
    wrong = x.index_fill(2, torch.tensor(3), torch.inf)
    attention = parallelize(module, alone)
    assert (attention(x, x, x) - module(x, x, x)).abs().max() < 1e-12
    with pytest.raises(ValueError, match="v must be finite, got inf at sample 0, head 0, posit"):
        attention(x, x, wrong)


def test_a_state_of_random_numbers_has_one_number_that_ranks_can_send() -> None:
    """It is sent as int64, where 0 means that nothing is drawn."""
    device, found = torch.device("cpu"), []
    with torch.random.fork_rng(devices=[]):
        for seed in (*range(40), 3):
            torch.manual_seed(seed)
            found.append(_random_state(device))
            torch.rand(1)
            assert _random_state(device) != found[-1]
    assert all(1 <= number <= 2**62 for number in found)
    assert len(set(found)) == 40
    assert found[-1] == found[3]
