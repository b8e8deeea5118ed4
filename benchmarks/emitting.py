"""How long `attnspec compile` takes beyond `import torch`, for every file of the zoo.

Both are whole processes, in turns, their modules compiled before. Every file is compiled once, the
slowest ones a few times more.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.block_plans import FILES, spread
from benchmarks.cases import Settings
from benchmarks.fresh import whole_process
from benchmarks.measuring import Json

TARGET = 1.5
"""The most seconds beyond `import torch`."""

AGAIN = 10
"""So many files, the slowest ones, are compiled again."""

WITHOUT = (sys.executable, "-c", "import torch")


def measure(settings: Settings) -> dict[str, Json]:
    """The median of the seconds beyond `import torch` for each file, the slowest first."""
    files = spread(FILES, settings.zoo)
    torch = [whole_process(WITHOUT)]
    with TemporaryDirectory() as folder:
        emitted = str(Path(folder) / "emitted.py")

        def seconds(path: Path) -> float:
            torch.append(whole_process(WITHOUT))
            command = (sys.executable, "-m", "attnspec", "compile", str(path), "-o", emitted)
            return whole_process((*command, "--force"))

        # the first run compiles the modules that are not
        seconds(files[0])
        times = {path: [seconds(path)] for path in files}
        for _ in range(settings.rounds - 1):
            for path in sorted(files, key=lambda path: -statistics.median(times[path]))[:AGAIN]:
                times[path].append(seconds(path))
    loading = statistics.median(torch)
    rows: list[Json] = [
        {"name": path.stem, "seconds": statistics.median(found) - loading, "runs": len(found)}
        for path, found in sorted(times.items(), key=lambda item: -statistics.median(item[1]))
    ]
    return {"target": TARGET, "import_torch": loading, "rows": rows}
