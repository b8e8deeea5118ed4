"""For test suites of models: one line that holds a model to the pairs it is meant to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from attnspec.spec import Spec


def assert_attends(
    model: nn.Module,
    spec: Spec,
    *args: Any,
    inputs: Mapping[str, object] | None = None,
    layers: Sequence[int | str] | int | str | None = None,
    exact: bool | None = None,
    positions: str = "absolute",
    call: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> None:
    """Raise AssertionError, with what was found, unless every attention layer of a model that is
    run on these arguments reads the pairs of the spec and no others; as `attnspec.verify_model`.

        assert_attends(model, spec, input_ids, attention_mask=mask)
    """
    from attnspec.model_check import verify_model

    settings: dict[str, Any] = {"inputs": inputs, "layers": layers, "exact": exact}
    given = {**kwargs, **(call or {})}
    found = verify_model(model, spec, *args, **settings, positions=positions, call=given)
    if not found.ok:
        raise AssertionError(str(found))
