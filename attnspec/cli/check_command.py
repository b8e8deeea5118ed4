"""`attnspec check`: what is wrong with specs, and whether their claims hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from attnspec.check.verdicts import Verdict
from attnspec.cli import console, options
from attnspec.cli.failures import status_of
from attnspec.cli.specs import shown_path, source_at
from attnspec.elaborate import attention_names
from attnspec.spec import Spec
from attnspec.text.diagnostics import Diagnostic, SpecError, count_of, in_order


@dataclass(frozen=True)
class Checked:
    """What was found in a file: its attentions, what is known of their claims, the messages."""

    file: str
    attentions: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    diagnostics: tuple[Diagnostic, ...]

    def count(self, severity: str) -> int:
        return sum(d.severity == severity for d in self.diagnostics)

    def summary(self) -> str:
        """One line: `bigbird.attn: ok, 3 claims hold for every n`."""
        found = {severity: self.count(severity) for severity in ("error", "warning")}
        parts = [count_of(number, severity) for severity, number in found.items() if number]
        if not found["error"]:
            parts = ["ok", *parts, *filter(None, [self._held()])]
        if len(self.attentions) > 1:
            parts.append(f"attentions checked: {', '.join(self.attentions)}")
        return f"{self.file}: {', '.join(parts)}"

    def _held(self) -> str:
        """`3 claims hold: `causal`, `stable` for every n; `depth <= 9` at n = 64`."""
        how: dict[str, list[str]] = {}
        for verdict in self.verdicts:
            if verdict.status == "proven":
                since = verdict.claim.since
                where = "for every n" if since is None else f"for every n >= {since:,}"
            elif verdict.status == "checked":
                where = f"at n = {', '.join(f'{n:,}' for n in verdict.lengths)}"
            else:
                continue
            how.setdefault(where, []).append(f"`{verdict.claim.text}`")
        total = sum(map(len, how.values()))
        text = f"{count_of(total, 'claim')} {'holds' if total == 1 else 'hold'}"
        if len(how) > 1:
            return f"{text}: " + "; ".join(f"{', '.join(x)} {where}" for where, x in how.items())
        return f"{text} {next(iter(how))}" if how else ""

    def to_dict(self, strict: bool) -> dict[str, object]:
        return {
            "file": self.file,
            "ok": status_of(self.diagnostics, strict) == 0,
            "attentions": list(self.attentions),
            "claims": len(self.verdicts),
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "errors": self.count("error"),
            "warnings": self.count("warning"),
        }


@click.command("check")
@options.specs_argument
@options.name_option
@options.set_option
@click.option("--strict", is_flag=True, help="Let warnings count as errors.")
@options.json_option
@click.pass_context
def command(
    ctx: click.Context,
    specs: Sequence[str],
    name: str | None,
    parameters: Mapping[str, str],
    strict: bool,
    as_json: bool,
) -> None:
    """Report what is wrong with specs, and whether their claims hold.

    All attentions of a file are checked. A claim is proven for every n if that follows from how the
    spec is written. Otherwise it is checked at n = 1, 2, 64, 257 and 1024. A claim with `at n = …`
    is checked at these lengths, and a claim with `for n >= N` at N, N + 1 and the larger defaults.
    The answer lists which claims are proven and which are checked. A claim that cannot be checked,
    for example about run-time inputs, gets a warning.

    Example: attnspec check bigbird --set block=32
    """
    checked = [check_file(spec, name, parameters) for spec in specs]
    diagnostics = [d for one in checked for d in one.diagnostics]
    status = status_of(diagnostics, strict)
    if as_json:
        console.result_json(
            {
                "ok": status == 0,
                "status": status,
                "files": [one.to_dict(strict) for one in checked],
                "diagnostics": [d.to_dict() for d in diagnostics],
            }
        )
    else:
        if diagnostics:
            console.diagnose(diagnostics)
        for one in checked:
            console.say(one.summary())
    ctx.exit(status)


def check_file(spec: str, name: str | None, parameters: Mapping[str, str]) -> Checked:
    """Check one attention of a file, or all where none is named."""
    shown = "<stdin>" if spec == "-" else shown_path(spec)
    names: list[str] = []
    diagnostics: list[Diagnostic] = []
    verdicts: list[Verdict] = []
    try:
        source = source_at(spec)
        attentions = attention_names(source)
        names = [one for one in attentions if name in (None, one)]
        # a file without any gets the message that says so
        chosen: Sequence[str | None] = names or [name]
        for one in chosen:
            try:
                loaded = Spec(source, name=one, parameters=dict(parameters))
                diagnostics.extend(loaded.check())
                verdicts.extend(loaded.verdicts)
            except SpecError as error:
                diagnostics.extend(error.diagnostics)
    except SpecError as error:
        diagnostics.extend(error.diagnostics)
    except Exception as error:
        error.add_note(f"while checking {shown}")
        raise
    return Checked(shown, tuple(names), tuple(verdicts), tuple(in_order(diagnostics)))
