"""Two specs compared: what is the same, for which lengths, and how that is said."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from goldens import Golden
from population import spec_of

from attnspec import diff
from attnspec.show.differences import Difference
from attnspec.text.diagnostics import AttnSpecError


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
        bodies = line.partition(": ")[2].split(" <> ")
        if line.startswith("proven") and not re.search(r"favor|input|lsh|linear|linformer", line):
            for n in (1, 2, 3, 7, 13):
                first, second = (spec_of(body).mask(n) for body in bodies)
                assert np.array_equal(first, second), (line, n)
    with pytest.raises(TypeError, match=r"got str; a mask .* by `spec\.compare\(mask, n\)`"):
        diff("a.attn", "b.attn", 8)  # type: ignore[arg-type]


def test_inputs_are_asked_for_by_name() -> None:
    reads, other = spec_of("input x: tokens attend global(x) | self"), spec_of("attend self")
    assert diff(reads, other, 8, {"x": np.array([3])}).only_in_a.count == 14
    for wrong in ({"y": np.array([3])}, {"x": np.array([9])}):
        with pytest.raises(AttnSpecError):
            diff(reads, other, 8, wrong)
    grid = spec_of("sequence grid(4, 8) attend axial")
    with pytest.raises(AttnSpecError):
        diff(grid, other, 33)
