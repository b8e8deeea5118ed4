"""What was verified, and what was found."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from attnspec.text.diagnostics import ranges


@dataclass(frozen=True)
class Check:
    """One thing that was compared, for `queries` of the last `asked` queries; `fault` says what
    differs, None if nothing.

    `heads` is None where the spec declares none and all are alike.
    """

    layers: tuple[int, ...]
    heads: tuple[int, ...] | None
    backend: str
    what: str
    queries: int
    asked: int
    fault: str | None


@dataclass(frozen=True)
class Verification:
    """All checks of a program at one length, with `m` between two sequences of as many queries and
    n keys; `str` has a line for each.

    `exhaustive` says that every pair was examined, and weighed. `skipped` says what was not,
    and why; `refused` which backends were asked and do not run it, with the reason; `inputs`
    which run-time inputs were drawn, in words.
    """

    name: str
    n: int
    exhaustive: bool
    checks: tuple[Check, ...]
    skipped: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    m: int | None = None
    inputs: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.fault is not None)

    @property
    def ok(self) -> bool:
        """Whether everything that was examined agrees."""
        return not self.faults

    def __str__(self) -> str:
        looked = "every pair was examined" if self.exhaustive else "not every pair was examined"
        queries = "" if self.m is None else f"m = {self.m:,}, "
        asked = self.n if self.m is None else self.m
        lines = [
            f"{self.name}, {queries}n = {self.n:,}: {len(self.checks)}"
            f" check{'s' * (len(self.checks) != 1)}, {len(self.faults)} failed; {looked}"
        ]
        if self.inputs:
            lines.append(f"inputs drawn: {', '.join(self.inputs)}")
        for check in self.checks:
            heads = "every head" if check.heads is None else f"head {ranges(check.heads)}"
            place = f"layer {ranges(check.layers)}, {heads}, {check.backend}"
            word = "ok  " if check.fault is None else "FAIL"
            # of which queries it speaks, where it is not all of them
            last = "" if check.asked == asked else "the last "
            some = f", at {last}{check.asked:,} queries" if last else ""
            if check.queries < check.asked:
                some = f", at {check.queries:,} of {last}{check.asked:,} queries"
            lines.append(f"{word}  {place}: {check.what}{some}")
            if check.fault is not None:
                lines.append(f"      {check.fault}")
        lines.extend(f"not examined: {what}" for what in self.skipped)
        lines.extend(f"not run: {why}" for _, why in self.refused)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, object]:
        return {
            "ok": self.ok,
            **{
                name: list(x) if isinstance(x, tuple) else x
                for name, x in asdict(self).items()
                if x is not None
            },
            "refused": [{"backend": name, "reason": why} for name, why in self.refused],
        }
