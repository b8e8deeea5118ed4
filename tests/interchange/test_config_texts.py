"""What specs of configs of transformers say: their texts, what a dictionary leaves out, and what is
refused. Whether models do so: test_configs.py."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from goldens import Golden
from tiny_models import transformers

from attnspec import AttnSpecError, from_hf_config


def test_configs_become_the_approved_specs(golden: Golden) -> None:
    """Of a dictionary, of an object of transformers, and of what that is saved as."""

    def written(config: dict[str, Any], **more: Any) -> str:
        source = from_hf_config(config, **more).source
        # computed fields may be null in a dictionary
        if config["model_type"] in transformers.CONFIG_MAPPING and None not in config.values():
            known = transformers.AutoConfig.for_model(**config)
            for form in (known, known.to_dict(), json.loads(known.to_json_string())):
                assert from_hf_config(form, **more).source == source
        return source

    golden.calls(lambda call: ("written", eval(f"written({call})", {"written": written})))


def test_a_dictionary_of_a_known_type_needs_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(AttnSpecError, match="needs transformers"):
        from_hf_config({"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 5})
    own = {"model_type": "mine", "num_hidden_layers": 1, "sliding_window": 5}
    assert from_hf_config(own, causal=True).layers == 1


def test_only_configs_are_taken() -> None:
    with pytest.raises(TypeError, match="config"):
        from_hf_config(3)
