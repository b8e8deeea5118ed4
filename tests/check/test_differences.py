"""Two specs compared: what is the same, for which lengths, and how that is said."""

from __future__ import annotations

import json

import numpy as np
from goldens import Golden
from population import spec_of

from attnspec import diff
from attnspec.show.differences import Difference

SAME = "# spellings of one graph\n"


def line_of(found: Difference, n: int, first: str, second: str) -> str:
    counts = f"{found.only_in_a.count}, {found.only_in_b.count}"
    must = {None: "unknown", True: "equal", False: f"differ by {counts}"}[found.equal]
    return f"{'proven' if found.proven else must} at {n}: {first} <> {second}"


def answer(line: str) -> tuple[str, list[str]]:
    """What of `… at N: BODY <> BODY` is said after the lines that name both and n."""
    asked, _, bodies = line.partition(": ")
    n, (first, second) = int(asked.split()[-1]), bodies.split(" <> ")
    found = diff(spec_of(first), spec_of(second), n)
    json.dumps(found.to_dict())
    back = diff(spec_of(second), spec_of(first), n)
    assert (back.equal, back.only_in_b) == (found.equal, found.only_in_a)
    return line_of(found, n, first, second), [x for x in str(found).splitlines()[3:] if x]


def test_differences(golden: Golden) -> None:
    golden.entries(answer)
    # what is proven holds at other lengths
    for line in golden.path().read_text(encoding="utf-8").splitlines():
        if line.startswith("proven") and not {"favor", "input", "lsh(", "linear("} & {
            word for word in ("favor", "input", "lsh(", "linear(") if word in line
        }:
            first, second = (spec_of(x) for x in line.partition(": ")[2].split(" <> "))
            for n in (1, 2, 3, 7, 13):
                assert np.array_equal(first.mask(n), second.mask(n)), (line, n)
