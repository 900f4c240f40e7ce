"""The page of `modelswarm ui` in headless Chromium: a chat goes on while its server is killed on the page.

With PICTURES set to a folder, screenshots of it are kept there; `docs/pictures/` has them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.eventually import eventually
from support.ports import free_port
from support.processes.programs.browser import Browser, chromium
from support.processes.programs.browser_page import Page, example_swarm, open_page

from modelswarm.local.swarm import LocalSwarm

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

QUESTION = "Count from 1 to 300."
SECONDS = 120.0
ANSWER = "#talk .assistant:last-of-type"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    with example_swarm(tmp_path_factory.mktemp("runtime"), hash_model=False) as made:
        yield made


@pytest.fixture(scope="module")
def page(local: LocalSwarm) -> Iterator[Page]:
    with open_page("--name", "counting") as opened:
        yield opened


@pytest.fixture
def browser(tmp_path: Path, page: Page) -> Iterator[Browser]:
    with chromium(tmp_path, free_port()) as made:
        made.open(page.url)
        eventually("servers are drawn", lambda: len(servers(made)) == 4, SECONDS)
        yield made
        assert made.problems() == []


def servers(browser: Browser) -> list[str]:
    found: list[str] = browser.run(
        "return [...document.querySelectorAll('.card')].map((each) => each.innerText)"
    )
    return found


def keep_picture(browser: Browser, name: str) -> None:
    if folder := os.environ.get("PICTURES"):
        browser.screenshot(Path(folder) / name)


def answer_has_ended(browser: Browser) -> bool:
    return bool(browser.run("return document.getElementById('stop').hidden"))


def test_chat_goes_on_when_its_server_is_killed_on_the_page(browser: Browser) -> None:
    assert browser.text("#state") == "ready" and browser.text("#name") == "counting"
    browser.type("#text", QUESTION)
    browser.click("#send")
    eventually("its route is shown", lambda: "→" in row_of_chat(browser), SECONDS)
    eventually("it answers", lambda: len(browser.text(ANSWER)) > 60, SECONDS)
    keep_picture(browser, "page-chat.png")
    lost = row_of_chat(browser).split("[0:4]")[0].split()[-1]
    browser.click(f"[data-server={lost}]")
    eventually("it was killed", lambda: f"{lost} was killed" in browser.text("#events"), SECONDS)
    eventually("the session moved", lambda: " moved: " in browser.text("#events"), SECONDS)
    assert lost not in row_of_chat(browser)
    assert not answer_has_ended(browser), "the answer was over before the kill"
    browser.run("return Promise.all(document.getAnimations().map((each) => each.finished))")
    keep_picture(browser, "page-kill.png")
    eventually("the answer ends", lambda: answer_has_ended(browser), SECONDS)
    text = browser.text(ANSWER)
    eventually("it is started again", lambda: "gone" not in " ".join(servers(browser)), SECONDS)
    assert text == uninterrupted(browser)
    assert browser.run("return document.querySelectorAll('#talk .note').length") == 0


def row_of_chat(browser: Browser) -> str:
    return str(browser.run("return document.querySelector('tr.mine')?.innerText ?? ''"))


def uninterrupted(browser: Browser) -> str:
    """Ask again in a new chat; return the answer."""
    browser.click("#again")
    assert browser.run("return document.getElementById('talk').childElementCount") == 0
    browser.type("#text", QUESTION)
    browser.click("#send")
    eventually("it answers", lambda: len(browser.text(ANSWER)) > 60, SECONDS)
    eventually("the answer ends", lambda: answer_has_ended(browser), SECONDS)
    return browser.text(ANSWER)


def test_stop_ends_an_answer_and_the_chat_goes_on(browser: Browser) -> None:
    browser.type("#text", QUESTION)
    browser.click("#send")
    eventually("it answers", lambda: len(browser.text(ANSWER)) > 20, SECONDS)
    browser.click("#stop")
    eventually("it has ended", lambda: answer_has_ended(browser), SECONDS)
    cut = browser.text(ANSWER)
    browser.type("#text", "Count from 5 to 9.")
    browser.click("#send")
    eventually(
        "the next answer ends",
        lambda: answer_has_ended(browser) and browser.text(ANSWER) not in ("", cut),
        SECONDS,
    )
    assert "9" in browser.text(ANSWER)


def test_enter_of_an_input_method_sends_nothing(browser: Browser) -> None:
    browser.type("#text", "Count from 5 to")
    press = (
        "document.getElementById('text').dispatchEvent("
        "new KeyboardEvent('keydown', {key: 'Enter', isComposing: arguments[0], cancelable: true}))"
    )
    browser.run(press, True)
    assert browser.run("return document.getElementById('talk').childElementCount") == 0
    browser.run(press, False)
    eventually("it is sent", lambda: "Count from 5 to" in browser.text("#talk .user"), SECONDS)


def test_answer_without_an_end_is_told(browser: Browser) -> None:
    """The process of the page ends in the middle: its connection closes as after a whole answer."""
    with open_page("--name", "counting") as own:
        browser.open(own.url)
        eventually("servers are drawn", lambda: len(servers(browser)) == 4, SECONDS)
        browser.type("#text", QUESTION)
        browser.click("#send")
        eventually("it answers", lambda: len(browser.text(ANSWER)) > 20, SECONDS)
    eventually("the answer ends", lambda: answer_has_ended(browser), SECONDS)
    assert browser.text("#talk .note")
    browser.open("about:blank")
    browser.problems()  # of snapshots that were asked for meanwhile


def test_wrong_token_and_text_of_others_show_as_text(browser: Browser, page: Page) -> None:
    browser.type("#text", "<img src=x onerror=alert(1)>")
    browser.click("#send")
    eventually("it is shown", lambda: "<img" in browser.text("#talk .user"), SECONDS)
    assert browser.run("return document.querySelectorAll('#talk img').length") == 0
    browser.open(f"{page.base}/?token=wrong")
    assert "no valid token" in browser.text("body")
    assert any("403" in each for each in browser.problems())
