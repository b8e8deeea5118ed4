"""`attnspec.zoo`: the specs that ship, by name."""

from __future__ import annotations

import pytest
import zoo

import attnspec
from attnspec.text.diagnostics import AttnSpecError


def test_every_spec_is_there_by_name() -> None:
    assert attnspec.zoo() == sorted(path.stem for path in zoo.FILES)
    for path, name in zoo.ATTENTIONS:
        assert attnspec.zoo(path.stem, name=name) == zoo.loaded(path, name)


def test_parameters_are_set() -> None:
    assert attnspec.zoo("bigbird", block=8) == attnspec.load(zoo.EXAMPLES / "bigbird.attn", block=8)
    assert attnspec.zoo("bigbird.attn").parameters["block"] == 64


def test_another_name_has_the_nearest() -> None:
    with pytest.raises(AttnSpecError, match="did you mean `bigbird`"):
        attnspec.zoo("bigbrid")
    with pytest.raises(AttnSpecError, match=r"no spec '\.\./setup'"):
        attnspec.zoo("../setup")
    with pytest.raises(TypeError, match="by name"):
        attnspec.zoo(3)  # type: ignore[call-overload]
