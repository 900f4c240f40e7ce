"""A headless Chromium, driven over WebDriver's HTTP. Tests need Debian's `chromium` and `chromium-driver`.

`make full-ready` installs them. Without them a test is skipped, and fails with `REQUIRE_CLUSTER=1`.
"""

from __future__ import annotations

import base64
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from support.eventually import eventually
from support.kubernetes.requirements import require

START_SECONDS = 60.0
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's key of an element
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--window-size=1320,860",
)


class Browser:
    """One window of one session of chromedriver."""

    def __init__(self, http: httpx.Client, session: str) -> None:
        self._http, self._session = http, session

    def call(self, method: str, path: str, body: Any = None) -> Any:
        content = {} if body is None and method == "POST" else body
        answer = self._http.request(method, f"/session/{self._session}{path}", json=content)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what the script returns; a promise is awaited."""
        return self.call("POST", "/execute/sync", {"script": script, "args": arguments})

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def click(self, selector: str) -> None:
        self.call("POST", f"/element/{self._find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        self.call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def label(self, selector: str) -> str:
        """Return the accessible name, as a screen reader says it."""
        return str(self.call("GET", f"/element/{self._find(selector)}/computedlabel"))

    def press(self, keys: str) -> None:
        """Type into the element that has the focus."""
        found = self.call("GET", "/element/active")[ELEMENT]
        self.call("POST", f"/element/{found}/value", {"text": keys})

    def command(self, name: str, **parameters: Any) -> Any:
        """Call a command of the Chrome DevTools Protocol; return its result."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def problems(self) -> list[str]:
        """Return what the console reports as errors, since the last call."""
        found = self.call("POST", "/se/log", {"type": "browser"})
        return [each["message"] for each in found if each["level"] == "SEVERE"]

    def _find(self, selector: str) -> str:
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        return str(found[ELEMENT])


@contextmanager
def chromium(folder: Path, port: int) -> Iterator[Browser]:
    """Yield a new window. `folder`: an empty one for the profile; `port`: a free one for chromedriver."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        require(["no Chromium is installed (make full-ready)"])
    assert binary is not None and driver is not None
    process = subprocess.Popen((driver, f"--port={port}", f"--log-path={folder / 'driver.log'}"),
                               stdout=subprocess.DEVNULL)  # fmt: skip
    base = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=base, timeout=120, trust_env=False) as http:
            eventually("chromedriver is ready", lambda: _is_ready(http), START_SECONDS)
            options = {"binary": binary, "args": [*FLAGS, f"--user-data-dir={folder / 'profile'}"]}
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": options,
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            made = http.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
            assert made.status_code == 200, made.text
            browser = Browser(http, made.json()["value"]["sessionId"])
            try:
                yield browser
            finally:
                browser.call("DELETE", "")
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(http: httpx.Client) -> bool:
    try:
        return bool(http.get("/status").json()["value"]["ready"])
    except httpx.TransportError:
        return False
