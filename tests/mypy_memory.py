"""A plugin of mypy that knows no types: it lets memory be looked through less often.

Nearly all that a run makes stays until its end, some 17 million objects. mypy looks through them
after each 200,000, for an eighth of its time, and finds nothing; without that it holds half a
gigabyte more.
"""

from __future__ import annotations

import gc

from mypy.plugin import Plugin


def plugin(version: str) -> object:
    # a daemon, which runs for days, is still looked through now and then
    gc.set_threshold(20_000_000, 30, 30)
    return Plugin
