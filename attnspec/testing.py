"""For test suites of models: one line that requires a model to read just the pairs of a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from attnspec.spec import Spec


def assert_attends(model: nn.Module, spec: Spec, *args: Any, **kwargs: Any) -> None:
    """Raise AssertionError, with the report, unless every attention layer of a running model reads
    just the pairs of the spec. The arguments are those of `attnspec.verify_model`.

        assert_attends(model, spec, input_ids, attention_mask=mask)
    """
    from attnspec.model_check import verify_model

    report = verify_model(model, spec, *args, **kwargs)
    if not report.ok:
        raise AssertionError(str(report))
