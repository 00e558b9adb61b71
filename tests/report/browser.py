"""A real browser, driven through its own debugging pipe: nothing has to be installed but Chromium.

Commands and events are JSON that ends with a zero byte; the browser reads them at descriptor 3 and answers at 4.
"""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--remote-debugging-pipe",
)
_LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_PATIENCE_S = 60.0


def find_chromium() -> str | None:
    """Where Chromium is; `MEMFIT_CHROMIUM` names another one."""
    return os.environ.get("MEMFIT_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One process of Chromium."""

    def __init__(self, profile: Path) -> None:
        chromium = find_chromium()
        assert chromium is not None
        commands, self._write = os.pipe()
        self._read, answers = os.pipe()
        arguments = [*_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        launch = [sys.executable, "-c", _LAUNCH, str(commands), str(answers), chromium, *arguments]
        self._process = subprocess.Popen(
            launch, pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Give one command and wait for its answer; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError, TimeoutError):
            self.send("Browser.close")
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            received = os.read(self._read, 1 << 20)
            if not received:
                raise OSError("the browser is gone")
            self._buffer += received
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)


class Page:
    """One tab of a certain size, with everything it complains about."""

    def __init__(self, browser: Browser, path: Path, *, width: int, height: int, dark: bool, still: bool) -> None:
        self._browser = browser
        self._target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        attached = browser.send("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.send("Emulation.setEmulatedMedia", features=features)
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete'")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def resize(self, width: int, height: int) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )

    def run(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not self.run(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def text(self, identity: str) -> str:
        return self.run(f"document.getElementById({identity!r}).textContent")

    def click(self, selector: str) -> None:
        """As a mouse does, in the middle of an element."""
        x, y = self.middle(selector)
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def middle(self, selector: str) -> tuple[float, float]:
        box = self.run(
            f"(() => {{ const found = document.querySelector({selector!r}); found.scrollIntoView({{block: 'center'}});"
            "const box = found.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
        )
        return box[0] + box[2] / 2, box[1] + box[3] / 2

    def mouse(self, kind: str, x: float, y: float) -> None:
        pressed = 0 if kind == "mouseMoved" else 1
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=pressed)

    def drag(self, start: tuple[float, float], stop: tuple[float, float]) -> None:
        self.mouse("mousePressed", *start)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=stop[0], y=stop[1], button="left", buttons=1)
        self.mouse("mouseReleased", *stop)

    def touch(self, x: float, y: float) -> None:
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def key(self, name: str, *, text: str = "") -> None:
        self.send("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, text=text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=name, code=name)

    def screenshot(self, path: Path) -> Path:
        """The whole page as a picture."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
        return path

    def complaints(self) -> list[str]:
        """Errors of scripts, of the console, of the page's policy, and requests for anything but the page itself."""
        self.run("0")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            method, parameters = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(str(parameters["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
                found.append(str(parameters["args"]))
            elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
                found.append(parameters["entry"]["text"])
            elif method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith("file:"):
                found.append("asked for " + parameters["request"]["url"][:200])
        return found

    def close(self) -> None:
        self._browser.send("Target.closeTarget", targetId=self._target)


@contextlib.contextmanager
def opened(
    browser: Browser, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, still: bool = True
) -> Iterator[Page]:
    """A page that is open for as long as it is needed."""
    page = Page(browser, path, width=width, height=height, dark=dark, still=still)
    try:
        yield page
    finally:
        page.close()
