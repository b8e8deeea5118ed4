"""What was made of a call's inputs is kept for the same ones alone."""

from __future__ import annotations

import copy
import gc
import pickle
from itertools import count

import numpy as np
import torch
from attention_checks import module_of

from attnspec.backends.common.remembered import Remembered

DEVICE = torch.device("meta")
"""A device that counts writes as a GPU does; of the CPU nothing is kept."""


def test_a_value_is_built_again_where_its_tensors_or_settings_differ() -> None:
    kept, numbers = Remembered[int](), count(1)

    def of(x: torch.Tensor, *settings: object) -> int:
        return kept.get([x], lambda: next(numbers), *settings)

    base = torch.arange(12, device=DEVICE)
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
    assert of(torch.arange(12, device=DEVICE)[6:], 7) == 6, where
    with torch.inference_mode():
        inner = torch.arange(3, device=DEVICE)
        assert of(inner) == 7
        assert of(inner) == 8


def test_writes_that_torch_does_not_see_are_read_on_the_cpu() -> None:
    kept, array = Remembered[int](), np.zeros(3, dtype=np.int64)
    ids = torch.from_numpy(array)
    assert kept.get([ids], lambda: int(ids.sum())) == 0
    array[0] = 7
    assert kept.get([ids], lambda: int(ids.sum())) == 7


def test_modules_that_were_called_are_copied_and_pickled() -> None:
    module = module_of("input document: ids attend where(document(q) - document(k) <= 0)")
    q, ids = torch.randn(1, 1, 8, 4), torch.arange(8)[None] // 3
    out = module(q, q, q, inputs={"document": ids})
    # what is kept of a device's tensors goes with no copy
    there = ids.to(DEVICE)
    module.engine._exact.get([there], lambda: None)
    assert module.engine._exact._last is not None
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert each.engine._exact._last is None
        assert torch.equal(each(q, q, q, inputs={"document": ids}), out)


def test_inputs_that_are_written_to_are_read_again() -> None:
    body = "causal input document: ids attend where(document(q) - document(k) <= 0)"
    module, q = module_of(body), torch.randn(1, 1, 8, 4)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    before = module(q, q, q, inputs={"document": ids})
    ids[:, 4:] = 1
    fresh = module_of(body)(q, q, q, inputs={"document": ids.clone()})
    assert torch.equal(module(q, q, q, inputs={"document": ids}), fresh)
    assert not torch.equal(before, fresh)
