"""Derivatives that a kernel takes of its formula."""

from __future__ import annotations

import pytest
import torch

from attnspec.backends.common.torch_modes import derivatives


@pytest.mark.parametrize("again", [False, True])
def test_there_are_none_of_what_is_not_differentiated(again: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    grad = [torch.ones(3)]
    assert derivatives(lambda x: [x.detach()], [x], [True], grad, again) == [None]
    assert derivatives(lambda x: [2 * x], [x], [False], grad, again) == [None]
    assert derivatives(lambda x: [None], [x], [True], [None], again) == [None]
    (found,) = derivatives(lambda x: [2 * x], [x], [True], grad, again)
    assert found is not None
    assert found.tolist() == [2.0] * 3
