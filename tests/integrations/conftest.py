"""What a test registers is taken back after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _no_names_left() -> Iterator[None]:
    # here, as it skips where transformers is not
    from tiny_models import names_restored

    with names_restored():
        yield
