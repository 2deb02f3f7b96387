"""A headless Chromium that tests open pages in, driven through a pipe by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
_PATIENCE = 60  # seconds for one answer


class Browser:
    """One tab."""

    def __init__(self, process: subprocess.Popen[bytes], asks: int, answers: int) -> None:
        self._process, self._asks, self._answers = process, asks, answers
        self._number, self._rest, self._events = 0, b"", list[dict[str, Any]]()
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._asks, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        found: dict[str, Any] = answer["result"]
        return found

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select([self._answers], [], [], _PATIENCE)[0]:
                raise TimeoutError(f"Chromium said nothing for {_PATIENCE} s")
            more = os.read(self._answers, 1 << 20)
            if not more:
                raise RuntimeError(f"Chromium has ended, with {self._process.wait()}")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def open(self, page: Path, *, width: int, dark: bool = False) -> None:
        """Until it is loaded; its scripts have run by then."""
        self._events.clear()
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=page.resolve().as_uri())
        while not any(each.get("method") == "Page.loadEventFired" for each in self._events):
            self._events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def errors(self) -> list[Any]:
        """What the console, the page's scripts and the network had to complain about."""
        self.evaluate("0")  # what was said before has come
        said = []
        for event in self._events:
            method, told = event.get("method"), event.get("params", {})
            if method in ("Runtime.exceptionThrown", "Network.loadingFailed"):
                said.append(told)
            if method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
                said.append(told["args"])
            if method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                said.append(told["entry"])
        return said

    def requests(self) -> list[str]:
        """Addresses that were asked for, the page's own left out."""
        sent = [each for each in self._events if each.get("method") == "Network.requestWillBeSent"]
        urls = [each["params"]["request"]["url"] for each in sent]
        return [url for url in urls if not url.startswith(("file:", "data:", "blob:"))]

    def screenshot(self, path: Path) -> None:
        """The whole page, from top to bottom."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium() -> Iterator[Browser]:
    assert CHROMIUM is not None
    (asked, asks), (answers, answered) = os.pipe(), os.pipe()
    # Its helper processes may write there until they have noticed its end.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        # It reads from descriptor 3 and writes to 4. As root it cannot have a sandbox.
        command = (
            f"exec {CHROMIUM} --headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage "
            f"--no-first-run --disable-background-networking --user-data-dir={home} "
            f"--remote-debugging-pipe 3<&{asked} 4>&{answered}"
        )
        process = subprocess.Popen(
            ["bash", "-c", command],
            pass_fds=(asked, answered),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(asked)
        os.close(answered)
        try:
            yield Browser(process, asks, answers)
        finally:
            process.terminate()
            process.wait()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            os.close(asks)
            os.close(answers)
