"""A real browser without a window, driven over a pipe by its own protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    # the page must not need one
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--remote-debugging-pipe",
)

KEYS = {"ArrowUp": 38, "ArrowDown": 40, "ArrowLeft": 37, "ArrowRight": 39}


def found() -> str | None:
    """The browser of this machine, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page of a browser; to be used in a `with`."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        self.size = width, height

    def __enter__(self) -> Browser:
        program = found()
        assert program is not None
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (theirs_in, self.to), (self.back, theirs_out) = os.pipe(), os.pipe()

        # the protocol reads from 3 and writes to 4; by way of 8 and 9, as a pipe may be one of them
        script = 'exec 8<&"$1" 9>&"$2" 3<&8 4>&9 8<&- 9>&-; shift 2; exec "$@"'
        flags = [*FLAGS, f"--user-data-dir={self.folder.name}", "about:blank"]
        pipes = [str(theirs_in), str(theirs_out)]
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *pipes, program, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.rest, self.count, self.session, self.events = b"", 0, "", list[dict[str, Any]]()
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        # as if its window were in front
        self.ask("Emulation.setFocusEmulationEnabled", enabled=True)
        width, height = self.size
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self.to)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.back)
        self.folder.cleanup()

    # --- the protocol ---

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            data = os.read(self.back, 1 << 16)
            if not data:
                raise ConnectionError("the browser ended")
            self.rest += data
        message, _, self.rest = self.rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command; what the page tells meanwhile is in `events`."""
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    # --- what people do ---

    def open(self, path: Path, dark: bool = False) -> None:
        """Show a file."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=path.resolve().as_uri())
        while not any(each.get("method") == "Page.loadEventFired" for each in self.events):
            self.events.append(self._next())

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What an element shows."""
        shown: str = self.run(f"document.querySelector({json.dumps(selector)}).innerText")
        return shown

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        names = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, **names)

    def complaints(self) -> list[str]:
        """What the page failed at, and what it asked for beside itself."""
        said = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
                said.append(json.dumps(params))
            if method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith("file:") or params.get("type") != "Document":
                    said.append(url)
        return said
