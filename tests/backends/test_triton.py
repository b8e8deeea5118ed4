"""Triton kernels under the interpreter against the definition, in tiles of a few rows: values,
log-sum-exps and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from attention_checks import GRAPHS, assert_agree, defined, module_of, spec_of, with_gradients
from attention_checks import tensors as tensors_of
from interpreted import interpreted
from random_specs import spec_text

import attnspec
from attnspec.backends.planner import plan
from attnspec.backends.triton import backend as backend_module
from attnspec.backends.triton.tuning import OnGpu
from attnspec.graphs.relation import Relation
from attnspec.lower.work import BackendError
from attnspec.spec import Spec

__all__ = ["interpreted"]

pytestmark = pytest.mark.usefixtures("interpreted", "small_tiles")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 16, so that short sequences have several."""
    monkeypatch.setattr(backend_module, "ON_GPU", OnGpu(targets=(16,)))


def tensors(
    n_q: int, n: int, *, heads: int = 1, key_heads: int = 1, batch: int = 1, size: int = 4
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensors_of(
        batch, heads, n_q, n, key_heads=key_heads, size=size, out_size=3, dtype=torch.float32
    )


def exact(given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.detach().double().requires_grad_() for x in given]


def check(spec: Spec, n_q: int, n: int, **shape: int) -> None:
    """Values and gradients of a module against the definition."""
    module = spec.compile(backend="triton")
    given = tensors(n_q, n, **shape)
    wide = exact(given)
    right = with_gradients(defined(spec, wide[0], wide[1], wide[2]), wide)
    base = with_gradients(defined(spec, *given), given)
    assert_agree(with_gradients(module(*given), given), right, base)


@pytest.mark.parametrize("name", GRAPHS)
def test_values_and_gradients(name: str) -> None:
    spec = spec_of(GRAPHS[name])
    check(spec, 1, 1)
    check(spec, 41, 41)


@pytest.mark.parametrize("name", ["causal", "strided", "blocks"])
def test_queries_are_the_last_positions_and_share_keys(name: str) -> None:
    check(spec_of(GRAPHS[name]), 18, 35, heads=4, key_heads=2)
