"""The page for a keyboard, a screen reader and weak eyes (WCAG 2.2 AA), in headless Chromium.

The gateway is a foreign one, and snapshots are given to the page itself: no swarm runs.
"""

from __future__ import annotations

import pytest
from support.processes.programs.browser import Browser
from support.processes.programs.held_gateway import HeldGateway
from support.processes.programs.shown_page import (
    ENTER,
    TAB,
    answer_shows,
    await_end,
    focused,
    send,
    show,
    snapshot,
    spoken,
)

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

LEAST_CONTRAST = 4.5  # of text, WCAG 1.4.3
CONTRASTS = """
document.documentElement.style.backgroundColor = "Canvas";
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const light = (element) => {
  const over = [];
  for (let each = element; each; each = each.parentElement) over.unshift(getComputedStyle(each).backgroundColor);
  return (front) => {
    for (const colour of [...over, ...front]) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((each) => each / 255)
      .map((each) => each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
};
return [...document.querySelectorAll("body *")].filter((each) => each.checkVisibility()
    && [...each.childNodes].some((child) => child.nodeType === 3 && child.data.trim())).map((each) => {
  const measure = light(each), back = measure([]), front = measure([getComputedStyle(each).color]);
  let opacity = 1;
  for (let own = each; own; own = own.parentElement) opacity *= getComputedStyle(own).opacity;
  const ratio = (Math.max(front, back) + 0.05) / (Math.min(front, back) + 0.05);
  return [each.textContent.slice(0, 40), opacity < 1 ? 1 : ratio];
});
"""


def test_every_control_of_the_page_has_a_name_of_its_own(browser: Browser) -> None:
    assert browser.label("#model") == "Model"
    assert browser.label("#text").startswith("Message")
    assert browser.label("[data-server=counting-s0-r0]") == "Kill counting-s0-r0"
    assert browser.label("#talk") == "Chat" and browser.label("#events") == "Events"
    assert browser.run("return document.querySelector('label[for=text]').checkVisibility()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_of_the_page_has_enough_contrast(browser: Browser, scheme: str) -> None:
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.command("Emulation.setEmulatedMedia", features=[feature])
    try:
        show(browser, servers=snapshot()["servers"][:1])  # the other one is gone
        browser.run("say('a question', 'user'); say('a thought', 'reasoning'); say('cut', 'note')")
        browser.run("document.querySelector('#sessions tr').className = 'mine moved'")
        for kind in ("ready", "waiting", "lost"):
            browser.run("showState(arguments[0], 'why'); note('event')", kind)
            found = browser.run(CONTRASTS)
            assert len(found) > 20
            assert [each for each in found if each[1] < LEAST_CONTRAST] == []
    finally:
        browser.command("Emulation.setEmulatedMedia", features=[])


def test_answer_is_spoken_once_at_its_end(browser: Browser, gateway: HeldGateway) -> None:
    send(browser, "Count.")
    for text in ("one ", "two ", "three"):
        gateway.say(text)
        answer_shows(browser, text.strip())
        assert spoken(browser) == "sent"
    gateway.end()
    await_end(browser)
    assert spoken(browser) == "one two three"


def test_refusal_of_a_turn_is_spoken(browser: Browser, gateway: HeldGateway) -> None:
    gateway.refusal = (429, "no room for 5 pages; retry in 1 s")
    send(browser, "Count.")
    answer_shows(browser, "no room for 5 pages")
    await_end(browser)
    assert "no room for 5 pages" in spoken(browser)


def test_focus_stays_on_the_page_after_each_button(browser: Browser, gateway: HeldGateway) -> None:
    browser.type("#text", "Count.")
    browser.press(TAB)
    assert focused(browser) == "send"
    browser.press(ENTER)
    gateway.say("one")
    answer_shows(browser, "one")
    assert focused(browser) == "text"
    browser.press(TAB)
    assert focused(browser) == "stop"
    browser.press(ENTER)
    await_end(browser)
    assert focused(browser) == "text"
    assert spoken(browser) == "stopped\none"
    browser.click("#again")
    assert focused(browser) == "text"


def test_empty_message_is_told_at_its_field(browser: Browser, gateway: HeldGateway) -> None:
    for text in ("", "  "):
        browser.run("document.activeElement.blur()")
        browser.type("#text", text) if text else browser.run(
            "document.getElementById('text').focus()"
        )
        browser.press(ENTER)
        assert browser.run("return document.getElementById('text').validationMessage")
        assert focused(browser) == "text"
    assert gateway.asked == []


def test_kill_keeps_its_focus_when_its_server_is_gone(browser: Browser) -> None:
    browser.run("document.querySelector('[data-server=counting-s1-r0]').focus()")
    show(browser, servers=snapshot()["servers"][:1])
    assert "gone" in browser.text(".card.gone")
    assert browser.run("return document.activeElement.dataset.server") == "counting-s1-r0"
    assert not browser.run("return document.activeElement.disabled")


def test_reduced_motion_moves_no_route(browser: Browser) -> None:
    feature = {"name": "prefers-reduced-motion", "value": "reduce"}
    script = "return getComputedStyle(document.querySelector('.grid path')).transitionDuration"
    assert browser.run(script) == "0.5s"
    browser.command("Emulation.setEmulatedMedia", features=[feature])
    try:
        assert browser.run(script) == "0s"
    finally:
        browser.command("Emulation.setEmulatedMedia", features=[])


@pytest.mark.parametrize("width", [1320, 660, 320])
def test_zoomed_page_cuts_nothing_off(browser: Browser, width: int) -> None:
    """At 200 % a window has half its width in CSS pixels, at 400 % a quarter (WCAG 1.4.4, 1.4.10)."""
    size = {"width": width, "height": 860, "deviceScaleFactor": 1, "mobile": False}
    browser.command("Emulation.setDeviceMetricsOverride", **size)
    try:
        shown = snapshot(spans=4)
        show(browser, **shown)
        browser.run("at('stop').hidden = false")
        assert browser.run("return document.documentElement.scrollWidth") <= width
        cut = """return [...document.querySelectorAll('.card')].filter((each) =>
            each.scrollWidth > each.clientWidth || each.scrollHeight > each.clientHeight).length"""
        assert browser.run(cut) == 0
    finally:
        browser.command("Emulation.clearDeviceMetricsOverride")


def test_snapshot_rewrites_only_what_has_changed(browser: Browser) -> None:
    """A reader in the table stays there, and a selected name stays selected."""
    browser.run("window.seen = [at('state').firstChild, ...at('sessions').rows[0].cells]")
    browser.run("window.seen.push(at('sessions').rows[0].cells[0].firstChild)")
    show(browser, **snapshot(length=13))
    assert browser.run("return window.seen.every((each) => each.isConnected)")
    assert browser.run("return at('sessions').rows[0].cells[2].textContent") == "13"
