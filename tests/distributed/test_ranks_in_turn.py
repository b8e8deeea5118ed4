"""Ranks as threads of this process, one at a time, compute what one does: values, gradients, bytes;
and say what is wrong, each of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from local_ranks import Case, tried
from rank_cases import (
    HERE,
    SOME,
    WINDOW,
    at_random,
    check,
    in_turns,
    of_types,
    of_zoo,
    partitioned,
    summed,
)
from ranks_in_turn import Rank, in_turn

import attnspec
from attnspec.distributed import LostRank, parallelize

MANY = 200


def said_of(case: Case) -> list[dict[str, Any]]:
    """What each rank says of a case."""
    return in_turn(case.ranks, lambda mesh: tried(case, mesh, mesh.number))


@pytest.mark.parametrize("case", HERE, ids=lambda case: case.label)
def test_ranks_together_compute_what_one_does(case: Case) -> None:
    check([[each] for each in said_of(case)], [case])


@pytest.mark.slow
def test_the_other_ways_over_ranks() -> None:
    for case in (
        case for every in (partitioned, of_types, summed) for case in in_turns(every(), 1)
    ):
        check([[each] for each in said_of(case)], [case])


@pytest.mark.slow
@pytest.mark.parametrize("case", of_zoo(), ids=lambda case: case.label)
def test_the_whole_zoo_over_ranks(case: Case) -> None:
    check([[each] for each in said_of(case)], [case])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SOME, SOME + MANY))
def test_random_compositions_over_ranks(seed: int) -> None:
    case = at_random(seed)
    check([[each] for each in said_of(case)], [case])


# --- what is wrong -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What one rank is called with."""

    spec: str = "layers 2 attend window(radius = 2)"
    batch: int = 2
    heads: int = 2
    key_heads: int = 2
    rows: int = 3
    size: int = 4
    values: int = 4
    kind: torch.dtype = torch.float64
    grad: str = ""
    padding: bool = False
    inputs: dict[str, torch.Tensor] | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def of(self, rank: Rank) -> str:
        """What the rank says against it, or nothing."""
        attention = parallelize(attnspec.parse(f"attention a {{ {self.spec} }}").compile(), rank)
        q, k, v = (
            torch.ones(self.batch, *shape, dtype=self.kind, requires_grad=name in self.grad)
            for name, shape in {
                "q": (self.heads, self.rows, self.size),
                "k": (self.key_heads, self.rows, self.size),
                "v": (self.key_heads, self.rows, self.values),
            }.items()
        )
        real = torch.ones(self.batch, self.rows, dtype=torch.bool) if self.padding else None
        try:
            attention(q, k, v, key_padding_mask=real, inputs=self.inputs, **self.more)
        except ValueError as error:
            return str(error)
        return ""


def each_says(right: Asked, wrong: Asked) -> list[str]:
    """What each of four ranks says where the third is called otherwise than the others."""
    return in_turn(4, lambda rank: (wrong if rank.number == 2 else right).of(rank))


TOLD = "what is given, asked for and differentiated"


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("the spec", {"spec": "layers 2 attend window(radius = 3)"}),
        ("the batch", {"batch": 1}),
        ("the number of heads", {"heads": 4}),
        ("the number of key heads", {"key_heads": 1}),
        ("the size of heads", {"size": 5}),
        ("the size of values", {"values": 5}),
        ("the floating type", {"kind": torch.float32}),
        ("the layer", {"more": {"layer": 1}}),
        *((TOLD, {"grad": name}) for name in "qkv"),
        (TOLD, {"padding": True}),
        (TOLD, {"more": {"return_lse": True}}),
    ],
)
def test_all_ranks_say_in_what_their_calls_differ(what: str, change: dict[str, Any]) -> None:
    said = each_says(Asked(), Asked(**change))
    assert len(set(said)) == 1
    assert said[0].startswith(f"{what} must be the same on every rank, got [")


def test_calls_that_are_alike_are_not_refused() -> None:
    assert each_says(Asked(), Asked()) == [""] * 4


def test_dropout_is_the_same_and_what_is_drawn_is_not() -> None:
    torch.manual_seed(0)
    dropping = Asked(more={"dropout_p": 0.5})
    for said in each_says(dropping, dropping):
        assert "random states must be others on every rank" in said

    def call(rank: Rank, chance: float) -> str:
        torch.manual_seed(rank.number)
        return Asked(more={"dropout_p": chance}).of(rank)

    assert in_turn(4, lambda rank: call(rank, 0.5)) == [""] * 4
    for said in in_turn(4, lambda rank: call(rank, 0.25 * (1 + rank.number % 2))):
        assert said.startswith("dropout_p must be the same on every rank")


def test_what_one_rank_is_refused_all_are() -> None:
    for number, said in enumerate(each_says(Asked(), Asked(values=0))):
        assert ("at least 1" if number == 2 else "rank 2 refused its part of this call") in said


def test_lists_that_name_no_key_are_refused_by_every_rank() -> None:
    # the twelve positions of four ranks, of which those that compute a head look at its lists
    right, wrong = (
        Asked(
            "input x: choices attend chosen(x)",
            batch=1,
            inputs={"x": torch.full((1, 1, 3, 1), last)},
        )
        for last in (11, 12)
    )
    assert each_says(right, right) == [""] * 4
    for number, said in enumerate(each_says(right, wrong)):
        assert ("`x` must name key blocks" if number % 2 else "rank 1 refused its part") in said


def test_shards_of_other_lengths_are_refused() -> None:
    for said in each_says(Asked(), Asked(rows=4)):
        assert "has the lengths [4, 4, 4, 1], got [3, 3, 4, 3]" in said


def test_sums_of_features_travel_without_log_sum_exps() -> None:
    asked = Asked("causal attend linear()", rows=300, more={"return_lse": True})
    for said in each_says(asked, asked):
        assert "come without log-sum-exps over several devices" in said


@pytest.mark.parametrize("after", ["forward", "nothing"])
def test_a_rank_that_ends_is_missed(after: str) -> None:
    module = attnspec.parse(WINDOW).compile()

    def call(rank: Rank) -> str:
        attention = parallelize(module, rank, timeout=7)
        x = torch.ones(1, 1, 3, 4, requires_grad=True)
        if after == "nothing" and rank.number == 1:
            return "ended"
        try:
            out = attention(x, x, x)
            if rank.number == 1:
                return "ended"
            out.sum().backward()
        except LostRank as error:
            return str(error)
        return "none"

    said = in_turn(3, call)
    assert said[1] == "ended"
    for number in (0, 2):
        assert said[number] == (
            f"rank {number} of 3 waited for the others, at most 7 s: a rank has ended"
        )
