"""The judgement of each command's output: a sentence that names its fault, or an empty string. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

Check = Callable[[str], str]

KILL_REMARK = re.compile(r"\*\*\* SIGKILL.*?\*\*\*", re.DOTALL)
SENTENCE_LINES = 4  # a refusal's sentence, which a terminal may wrap, and make's own line


def has(*parts: str) -> Check:
    """Return a check that the output has all `parts`, in any order and however it is wrapped."""

    def check(output: str) -> str:
        flat = " ".join(output.split())
        missing = [part for part in parts if part not in flat]
        return f"the output lacks {', '.join(map(repr, missing))}" if missing else ""

    return check


def refuses(sentence: str, lines: int | None = SENTENCE_LINES) -> Check:
    """Return a check of a refusal: it has the sentence, no traceback and, if given, at most so many lines."""

    def check(output: str) -> str:
        if "Traceback" in output:
            return "the refusal is a traceback"
        if lines is not None and len(output.strip().splitlines()) > lines:
            return f"the refusal has more than {lines} lines"
        return has(sentence)(output)

    return check


def counts(first: int, last: int) -> Check:
    """Return a check that the output has each number of the range once, in order, and none between them."""
    wanted = [str(number) for number in range(first, last + 1)]

    def check(output: str) -> str:
        words = output.split()
        starts = [place for place, word in enumerate(words) if word == wanted[0]]
        if any(words[place : place + len(wanted)] == wanted for place in starts):
            return ""
        return f"the numbers from {first} to {last} are not all there, once and in order"

    return check


def check_demo(output: str) -> str:
    """The demo's second answer counts to 200 through the kill, and the demo says that nothing was lost."""
    answer = output.partition("kill in the middle:")[2].partition("route before")[0]
    return has("*** SIGKILL", "identical to the run without a failure: yes")(output) or counts(
        1, 200
    )(KILL_REMARK.sub(" ", answer))


def check_stream(output: str) -> str:
    """The stream of the curl request counts from 57 to 70 and ends as OpenAI's does."""
    events = [line[6:] for line in output.splitlines() if line.startswith("data: ")]
    if events[-1:] != ["[DONE]"]:
        return "the stream does not end with [DONE]"
    choices = [json.loads(event)["choices"] for event in events[:-1]]
    text = "".join(each[0]["delta"].get("content") or "" for each in choices if each)
    return counts(57, 70)(text)
