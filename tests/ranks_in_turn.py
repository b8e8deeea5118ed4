"""The ranks of a mesh as threads of this process, one at a time: all of the package is what runs,
and `all_to_all_single` alone stands in for the network's.

A rank runs until it waits for what others send; which of them comes next does not matter, since
each writes only what is its own. What waits for a rank that ended is told so, as a network would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Network:
    """What ranks have sent, round by round; who holds `turn` runs."""

    def __init__(self, ranks: int) -> None:
        self.turn = threading.Condition()
        # of each rank the pieces that it sends to all ranks, one round after the other
        self.sent: list[list[list[Tensor]]] = [[] for _ in range(ranks)]
        self.ended = [False] * ranks

    def waits(self, number: int) -> bool:
        """Whether somebody has still to send what belongs to a round, and will."""
        behind = [len(each) <= number for each in self.sent]
        lost = any(late and gone for late, gone in zip(behind, self.ended, strict=True))
        return any(behind) and not lost


@dataclass(frozen=True)
class Rank:
    """One of the ranks, which is its own group, and the mesh that the package asks for it."""

    network: Network
    number: int
    ndim: int = 1

    def get_group(self) -> Rank:
        return self

    def get_local_rank(self) -> int:
        return self.number

    def size(self) -> int:
        return len(self.network.sent)


@dataclass
class Round:
    """Numbers on their way to a rank: they are written where it waits for them."""

    rank: Rank
    number: int
    out: Tensor
    got: list[int]

    def wait(self, timeout: Any) -> bool:
        network, me = self.rank.network, self.rank.number
        network.turn.wait_for(lambda: not network.waits(self.number))
        if any(len(each) <= self.number for each in network.sent):
            raise RuntimeError("a rank has ended")
        pieces = [each[self.number][me] for each in network.sent]
        assert [len(piece) for piece in pieces] == self.got
        assert all(piece.dtype == self.out.dtype for piece in pieces)
        self.out.data.copy_(torch.cat(pieces))
        return True


def _all_to_all(
    out: Tensor,
    flat: Tensor,
    got: list[int],
    sent: list[int],
    *,
    group: Rank,
    async_op: bool,
) -> Round:
    assert async_op
    mine = group.network.sent[group.number]
    # what is sent later must not change it, and what is read too early is NaN
    mine.append(list(torch.split(flat.detach().clone(), sent)))
    out.fill_(torch.nan if out.is_floating_point() else 99)
    group.network.turn.notify_all()
    return Round(group, len(mine) - 1, out, got)


def in_turn(ranks: int, run: Callable[[Rank], T]) -> list[T]:
    """What each rank returns; the error of the first that has one and did not wait."""
    network = Network(ranks)
    found: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def one(number: int) -> None:
        with network.turn:
            try:
                found[number] = run(Rank(network, number))
            except BaseException as error:
                errors.append(error)
            network.ended[number] = True
            network.turn.notify_all()

    with mock.patch.multiple(
        dist,
        all_to_all_single=_all_to_all,
        get_world_size=Rank.size,
        get_rank=lambda rank: rank.number,
    ):
        threads = [threading.Thread(target=one, args=(number,)) for number in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return found
