"""The chat of the page in headless Chromium: what a user meets when a turn is refused, empty, long or cut off."""

from __future__ import annotations

import pytest
from support.eventually import eventually
from support.processes.programs.browser import Browser
from support.processes.programs.held_gateway import HeldGateway
from support.processes.programs.shown_page import (
    SECONDS,
    answer_shows,
    await_end,
    send,
    show,
    snapshot,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def test_refused_message_is_given_back(browser: Browser, gateway: HeldGateway) -> None:
    gateway.refusal = (429, "no room for 5 pages; retry in 1 s")
    send(browser, "Count from 1 to 5.")
    answer_shows(browser, "no room for 5 pages")
    await_end(browser)
    assert browser.run("return at('text').value") == "Count from 1 to 5."


def test_empty_answer_is_told(browser: Browser, gateway: HeldGateway) -> None:
    send(browser, "Count.")
    gateway.end()
    await_end(browser)
    assert browser.text("#talk .note") == "the answer is empty"


def test_reader_who_scrolled_up_stays_there(browser: Browser, gateway: HeldGateway) -> None:
    send(browser, "Count.")
    lines = "\n".join(map(str, range(100)))
    gateway.say(lines)
    answer_shows(browser, "99")
    at_end = "return at('talk').scrollTop + at('talk').clientHeight >= at('talk').scrollHeight - 2"
    eventually("the end is shown", lambda: browser.run(at_end), SECONDS)
    browser.run("at('talk').scrollTop = 0")
    gateway.say("more")
    gateway.end()
    answer_shows(browser, "more")
    await_end(browser)
    assert browser.run("return at('talk').scrollTop") == 0


def test_tokens_of_one_moment_cost_one_layout(browser: Browser) -> None:
    """With one each, 8000 pieces of 100 characters took longer than 90 s."""
    browser.command("Performance.enable")
    before = layouts(browser)
    browser.run(
        "const line = say('', 'assistant'); for (let n = 0; n < 1000; n++) add(line, 'word ')"
    )
    assert browser.text("#talk").count("word") == 1000
    assert layouts(browser) - before < 100


def layouts(browser: Browser) -> int:
    metrics = browser.command("Performance.getMetrics")["metrics"]
    return int(next(each["value"] for each in metrics if each["name"] == "LayoutCount"))


def test_lost_connection_names_what_to_do(browser: Browser) -> None:
    """The request fails in the browser, as after the end of the page's process."""
    browser.command("Network.enable")
    offline = {"latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    browser.command("Network.emulateNetworkConditions", offline=True, **offline)
    try:
        send(browser, "Count.")
        await_end(browser)
        assert "the page's server does not answer" in browser.text("#talk .note")
    finally:
        browser.command("Network.emulateNetworkConditions", offline=False, **offline)
        browser.command("Network.disable")


def test_chosen_model_stays_while_it_is_not_served(browser: Browser) -> None:
    """A gateway that starts again knows its models one by one."""
    show(browser, **snapshot(models=("a", "m")))
    browser.run("at('model').value = 'm'; at('model').onchange()")
    for models in ((), ("a",)):
        show(browser, **snapshot(models=models))
        assert browser.run("return [model, at('model').value]") == ["m", "m"]
        assert browser.text("#reason") == "m is not served"
    show(browser, **snapshot(models=("a", "m")))
    assert browser.run("return at('model').value") == "m"
    assert browser.text("#state") == "ready"
