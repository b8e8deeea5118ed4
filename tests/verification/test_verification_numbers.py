"""What verification allows of numbers and of counts of pairs: what is just within its bounds
passes, and what is a little beyond them is found."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention_checks import module_of, spec_of

from attnspec.ir.mechanisms.rbf import Rbf
from attnspec.lower.lower import Binder
from attnspec.lower.work import Softcap
from attnspec.verification.definition import Results
from attnspec.verification.formulas import FormulaTrial, Run
from attnspec.verification.numbers import (
    SIZE,
    error_bound,
    moderate,
    numbers_fault,
    support_fault,
    weights_fault,
)

EPS = torch.finfo(torch.float32).eps


def results(output: torch.Tensor, largest: float, table: torch.Tensor | None = None) -> Results:
    """Results of five queries, gradients 0."""
    names, rest = ("output", "dq", "dk", "dv"), [torch.zeros(5, 3, dtype=output.dtype)] * 3
    if table is None:
        return Results(names, (output, *rest), largest)
    return Results((*names, "dbias"), (output, *rest, table), largest)


@pytest.mark.parametrize("largest", [0.5, 40.0])
@pytest.mark.parametrize("noise", [0.0, 3e-5])
def test_an_error_is_allowed_up_to_twice_that_of_the_definition(
    largest: float, noise: float
) -> None:
    exact = torch.randn(5, 3, dtype=torch.float64)
    base = exact.clone()
    base[1, 2] += noise
    allowed = 2 * noise + 16 * EPS * largest
    assert error_bound(exact, base, torch.float32, largest) == pytest.approx(allowed, rel=1e-6)
    for part, found in ((0.9, False), (1.1, True), (-0.9, False), (-1.1, True)):
        mine = exact.clone()
        mine[4, 0] += part * allowed
        fault = numbers_fault(
            results(mine, largest), results(exact, largest), results(base, largest)
        )
        assert (fault is not None) == found
        if fault is not None:
            assert fault.startswith("the output errs by ")
            assert "in row 4" in fault


def test_what_is_no_number_errs() -> None:
    exact = torch.randn(5, 3, dtype=torch.float64)
    mine = exact.clone()
    mine[2, 1] = torch.nan
    fault = numbers_fault(results(mine, 1.0), results(exact, 1.0), results(exact, 1.0))
    assert fault is not None
    assert "in row 2" in fault


def test_the_gradient_of_a_table_may_err_as_the_root_of_its_pairs() -> None:
    # five queries and five keys, shared by four buckets: the root of 25 / 4 more
    exact, table = torch.zeros(5, 3, dtype=torch.float64), torch.tensor([3.0, 0, 0, 0]).double()
    allowed = 16 * EPS * 3.0 * 2.5
    right = results(exact, 1.0, table)
    for part, found in ((0.9, False), (1.1, True)):
        mine = results(exact, 1.0, table + torch.tensor([0, 0, part * allowed, 0]))
        fault = numbers_fault(mine, right, right)
        assert (fault is not None) == found


ROWS = np.array([7, 9])


def weights() -> torch.Tensor:
    """What two queries give six keys: not the last two, and one of them very little."""
    rows = [[0.5, 0.25, 0.25, 0, 0, 0], [0.75, 0.25, 1e-100, 0, 0, 0]]
    return torch.tensor(rows, dtype=torch.float64)


def test_weights_may_be_rounded_and_no_more() -> None:
    meant = weights()
    for by, found in ((1e-11, False), (-1e-11, False), (5e-11, True), (-5e-11, True)):
        wrong = meant.clone()
        wrong[1, 1] += by
        fault = weights_fault(wrong, meant, meant > 0, ROWS, 100)
        assert (fault is not None) == found
        if fault is not None:
            assert fault[:3] == (True, 9, 101)
        fault_of_support = support_fault(wrong, meant, ROWS)
        assert (fault_of_support is not None) == found
        if found:
            assert fault_of_support == "the gradient of query 9 is wrong at key 1"


def test_the_least_weight_too_many_or_too_few_is_found() -> None:
    meant = weights()
    held = meant > 0
    for at, to, said in (
        ((1, 2), 0.0, "query 9 does not read key 2"),
        ((0, 4), 1e-200, "query 7 reads key 4, which is no pair"),
    ):
        wrong = meant.clone()
        wrong[at] = to
        fault = weights_fault(wrong, meant, held, ROWS, 0)
        assert fault is not None
        assert fault == (False, int(ROWS[at[0]]), at[1], said)
        query, key = int(ROWS[at[0]]), at[1]
        assert support_fault(wrong, meant, ROWS) == (
            f"the gradient of query {query} is wrong at key {key}"
        )
    # what may be rounded to nothing is no fault
    meant[1, 2] = wrong[1, 2] = 0.0
    held[1, 2] = True
    assert weights_fault(meant, meant, held, ROWS, 0) is None
    assert support_fault(meant, meant, ROWS) is None


@pytest.mark.parametrize("of", [0, 1])
def test_weights_that_are_no_numbers_are_found(of: int) -> None:
    wrong = weights()
    wrong[of, 0] = torch.nan
    assert weights_fault(wrong, weights(), weights() > 0, ROWS, 0) is not None
    assert support_fault(wrong, weights(), ROWS) is not None


@pytest.mark.parametrize("size", [0.25, 1.0, 40.0])
def test_weights_of_formulas_may_be_rounded_by_the_largest_of_their_row(size: float) -> None:
    """Some are negative, and the sum of a row's sizes is then more than 1."""
    meant = torch.tensor([[0.5, -0.25, 0.5, 0.25], [size, -size / 2, 0.0, 0.125]]).double()
    trial = FormulaTrial(Run(module_of("attend linear()"), 0, 2, 9, 1, {}), [])
    allowed = 16e-12 * max(1.0, size)
    for part, found in ((0.9, False), (1.1, True), (-0.9, False), (-1.1, True), (np.nan, True)):
        wrong = meant.clone()
        wrong[1, 2] += part * allowed
        fault = trial._weights_fault(wrong, meant)
        assert (fault is not None) == found
        if fault is not None:
            assert fault.startswith("query 8 weighs key 2 with ")


@pytest.mark.parametrize(
    "body",
    [
        "attend full",
        "scale 3.0 attend full",
        "scale 0.01 attend full",
        "attend full score softcap(cap = 0.3)",
        "attend rbf()",
        "attend rbf(sigma = 0.1)",
        "attend rbf(sigma = 100)",
    ],
)
def test_what_is_tried_has_scores_of_about_one(body: str) -> None:
    spec = spec_of(f"heads 2 {body} head 1 {{ attend self }}")
    works = list(Binder(spec.program, {}).works(0, 2, 5, 5))
    (work,) = (work for work, heads in works if 0 in heads)
    factors = [x[0].item() for x in moderate(works, 2)]
    # powers of 2, so that nothing is rounded
    assert all(math.frexp(x)[0] == 0.5 and x <= 1.0 for x in factors)
    # the root of the mean square of what is in the exponent, or under the cap
    if isinstance(work.mechanism, Rbf):
        most, size = 1.0, max(factors) * math.sqrt(SIZE) / work.mechanism.sigma
    else:
        scale = SIZE**-0.5 if work.scale is None else work.scale
        most = min([1.0, *(x.cap for x in work.changes if isinstance(x, Softcap))])
        size = factors[0] * factors[1] * scale * math.sqrt(SIZE)
    assert size <= most
    # not smaller than it must be
    assert size > most / 2 or max(factors) == 1.0
