"""The table of what torch does with modules: each cell is what happens."""

from __future__ import annotations

import pytest
from transcripts import blocks, run_python
from transforms import KINDS, PAGE, ROWS, WORKS, Kind, Row, line, outcome, refusal_of

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning"
)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * row.slow) for row in ROWS], ids=str
)
# exporters warn of what they import
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_row_is_what_happens(row: Row) -> None:
    found = [outcome(row, kind) for kind in KINDS]
    assert line(row, found) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_page_has_every_row_once() -> None:
    table = PAGE.read_text(encoding="utf-8").split("transforms -->")[1].splitlines()
    titles = [row.split("|")[1].strip() for row in table if row.startswith("| ")]
    assert titles == ["", *(row.title for row in ROWS)]


def test_an_error_of_torch_is_no_refusal() -> None:
    def broken(kind: Kind) -> None:
        raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        outcome(Row("broken", broken), KINDS[0])
    assert refusal_of(None) == ""
    assert outcome(ROWS[5], KINDS[0]) != WORKS


def test_the_pages_python_runs() -> None:
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(PAGE.read_text(encoding="utf-8"))):
        run_python(block, names, f"{PAGE.name}, block {number}")
