"""What was made of a call's inputs is kept for the same ones alone."""

from __future__ import annotations

import gc
from itertools import count

import torch
from attention_checks import module_of

from attnspec.backends.common.remembered import Remembered


def test_a_value_is_built_again_where_its_tensors_or_settings_differ() -> None:
    kept, numbers = Remembered[int](), count(1)

    def of(x: torch.Tensor, *settings: object) -> int:
        return kept.get([x], lambda: next(numbers), *settings)

    base = torch.arange(12)
    assert of(base[None, :6]) == of(base[None, :6]) == 1
    # another part, another shape, other numbers, another setting
    assert [of(base[None, 6:]), of(base[6:]), of(base[6:], 7)] == [2, 3, 4]
    base[0] = 9
    assert of(base[6:], 7) == 5
    # another tensor at the same place
    where = base.data_ptr()
    del base
    gc.collect()
    assert kept._last is None
    assert of(torch.arange(12)[6:], 7) == 6, where
    with torch.inference_mode():
        inner = torch.arange(3)
        assert of(inner) == 7
        assert of(inner) == 8


def test_inputs_that_are_written_to_are_read_again() -> None:
    body = "causal input document: ids attend where(document(q) - document(k) <= 0)"
    module, q = module_of(body), torch.randn(1, 1, 8, 4)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    before = module(q, q, q, inputs={"document": ids})
    ids[:, 4:] = 1
    fresh = module_of(body)(q, q, q, inputs={"document": ids.clone()})
    assert torch.equal(module(q, q, q, inputs={"document": ids}), fresh)
    assert not torch.equal(before, fresh)
