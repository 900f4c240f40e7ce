"""Steps of tests on the page in a browser, and a snapshot that the page is given: no swarm runs."""

from __future__ import annotations

from typing import Any

from support.eventually import eventually
from support.processes.programs.browser import Browser

SECONDS = 60.0
ENTER, TAB = "\ue007", "\ue004"


def show(browser: Browser, **changes: Any) -> None:
    browser.run("show(arguments[0])", snapshot() | changes)


def snapshot(length: int = 12, spans: int = 2, models: tuple[str, ...] = ("m",)) -> dict[str, Any]:
    servers = [
        {
            **{"server": f"counting-s{number}-r0", "model": "m", "health": "linked"},
            **{"first": 2 * number, "last": 2 * number + 2, "n_blocks": 2 * spans},
            **{"sessions": 100, "step_ms": 120.5, "free_pages": 12000, "total_pages": 22760},
        }
        for number in range(spans)
    ]
    route = [{"peer": f"{each['server']}/1", **each} for each in servers]
    session = {"id": "m:12345678abcdef", "session": "12345678abcdef", "model": "m", "epoch": 1}
    session |= {"state": "running", "hold_reason": "", "length": length, "route": route}
    states = [{"model": name, "ready": True, "reason": "", "chat_problem": ""} for name in models]
    shown = {"can_kill": True, "can_chat": True, "error": None, "swarm": "counting"}
    return shown | {"models": states, "servers": servers, "sessions": [session]}


def send(browser: Browser, text: str) -> None:
    browser.type("#text", text)
    browser.press(ENTER)


def focused(browser: Browser) -> str:
    return str(browser.run("return document.activeElement.id"))


def spoken(browser: Browser) -> str:
    return str(browser.run("return document.getElementById('spoken').textContent"))


def await_end(browser: Browser) -> None:
    script = "return document.getElementById('stop').hidden"
    eventually("the answer ends", lambda: browser.run(script), SECONDS)


def answer_shows(browser: Browser, text: str) -> None:
    eventually("it is shown", lambda: text in browser.text("#talk"), SECONDS)
