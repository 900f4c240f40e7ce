"""The commands of the README, in its order, as they are written in its code blocks. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
COMMENT = re.compile(r"(?:^|\s+)# .*$")
SHELL = ("", "bash", "sh")


@dataclass(frozen=True, slots=True)
class Command:
    """One line of shell, or several that a backslash joins."""

    section: str
    text: str


def commands(page: str) -> list[Command]:
    """Return the commands of all code blocks of shell, without comments."""
    return [
        Command(section_at(page, block.start()), command)
        for block in BLOCK.finditer(page)
        if block[1] in SHELL
        for line in re.sub(r"\\\n\s*", "", block[2]).splitlines()
        if (command := COMMENT.sub("", line).strip())
    ]


def documents(page: str) -> list[str]:
    """Return the swarm documents of the page."""
    return [
        block[2]
        for block in BLOCK.finditer(page)
        if block[1] == "yaml" and "kind: ModelSwarm" in block[2]
    ]


def section_at(page: str, place: int) -> str:
    """Return the heading above a place of the page. A comment in a code block is no heading."""
    blocks = [block.span() for block in BLOCK.finditer(page)]
    headings = [
        found[1]
        for found in HEADING.finditer(page, 0, place)
        if not any(start <= found.start() < end for start, end in blocks)
    ]
    return headings[-1] if headings else ""
