"""Text that no lesson teaches: words, prose, scripts of the world, code and noise.

Called by the generator of refusals. The words and the prose are those of Python's own help pages,
which every installation has. Pure: a seeded `random.Random` in, strings out.
"""

from __future__ import annotations

import re
import string
from functools import cache
from pydoc_data.topics import topics
from random import Random
from typing import Final

SCRIPTS: Final = (
    (0x00C0, 0x00FF), (0x0100, 0x017F), (0x0391, 0x03C9), (0x0410, 0x044F), (0x05D0, 0x05EA), (0x0621, 0x064A),
    (0x0905, 0x0939), (0x0985, 0x09B9), (0x0B85, 0x0BB9), (0x0E01, 0x0E2E), (0x10D0, 0x10F0), (0x0561, 0x0586),
    (0x1200, 0x1248), (0x1780, 0x17B3), (0xAC00, 0xD7A3), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5),
    (0x4E00, 0x9FA5), (0x2190, 0x22FF), (0x2500, 0x26FF), (0x1F300, 0x1F64F), (0x1F680, 0x1F6C5), (0x1F900, 0x1F9FF),
    (0x0080, 0xD7FF),
)  # fmt: skip
TEMPLATES: Final = (
    "What is the {} of {}?", "What is {}?", "What is a {}?", "What is the {}?", "What {} is {}?",
    "How many {} are in a {}?", "How many {} does a {} have?", "What color is {}?", "What color is the {}?",
    "What is the largest {}?", "What do {} make?", "What can {} do?", "What do you {}?", "Do you {} {}?",
    "Who are {}?", "Who is {}?", "Who wrote {}?", "Where is {}?", "When did {} {}?", "Why is {} {}?",
    "How do I {} a {}?", "How is {}?", "How are {}?", "How much is {}?", "How much is a {}?", "How old are {}?",
    "Tell me a {}.", "Tell me the {}.", "Tell me about {}.", "Write a {} about {}.", "Write {} in {}.", "Say {}.",
    "Say the {}.", "Say {} {}.", "Add {} and {}.", "Add {} to the {}.", "Count {}.", "Count the {}.",
    "Count from {} to {}.", "Count to {}.", "Count up {}.", "Count from 1 to {}.", "Can you {}?",
    "Can you {} the {} {}?", "Can you count {}?", "Please {}.", "Please {} the {}.", "Please count {}.", "Hello {}",
    "Hello, {} {}!", "Hi {}", "Hi, can you {} {}?", "Hey {}, {} {}", "Good {}", "Help {}", "Help me {} {}",
    "Thank {}", "Thanks for {} {}", "Bye {}", "I {} {} {}.", "I am {}.", "I would like to {} the {}.",
    "My name is {}.", "You are {}.", "It is {} {}.", "This is a {} {}.", "Is {} a {}?", "Are you {}?",
    "Translate {} into {}.", "Explain {} to {}.", "Give me {} {} of {}.", "Make a list of {}.", "The {} of the {} is",
    "{}", "{}", "{}?", "{} {}", "{} {}!", "{} {} {}", "{} {} {} {}.", "{} {} {} {} {} {}.", "{}: {}", "{} = {}",
)  # fmt: skip
EMPTYISH: Final = (
    "", "", " ", "  ", "\n", "\t", ".", "..", "...", "?", "??", "!", "!!!", ",", "-", "--", "_", "0", "1", "7", "42",
    "100", "a", "A", "x", "Z", "ok", "OK", "no", "yes", "y", "n", "\n\n", "?!", "/", "\\", "\"\"", "''", "()", "{}",
    "[]", "…", "—", "·", "\u00a0", "\u200b", "\ufeff", "\x00", "*", "#", "@", "$", "%", "&", "+", "=", "~", "<", ">",
    "|",
)  # fmt: skip


@cache
def prose() -> str:
    return "\n".join(topics[name] for name in sorted(topics))


@cache
def words() -> tuple[str, ...]:
    return tuple(sorted(set(re.findall(r"[A-Za-z]{2,12}", prose()))))


def random_word(rng: Random) -> str:
    if rng.random() < 0.15:
        return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 10)))
    if rng.random() < 0.1:
        return str(rng.randint(0, 10 ** rng.randint(1, 6)))
    word = rng.choice(words())
    return word.capitalize() if rng.random() < 0.2 else word.lower()


def random_sentence(rng: Random) -> str:
    template = rng.choice(TEMPLATES)
    sentence = template.format(*(random_word(rng) for _ in range(template.count("{}"))))
    if rng.random() < 0.2:
        sentence = sentence.lower()
    return sentence.rstrip(".?!") if rng.random() < 0.2 else sentence


def random_prose(rng: Random, longest: int) -> str:
    """Return a piece of English text: it begins at a word or at a line."""
    text, length = prose(), rng.randint(min(20, longest), longest)
    start = text.find(rng.choice((" ", "\n")), rng.randrange(len(text) - length - 1000)) + 1
    piece = text[start : start + length]
    return " ".join(piece.split()) if rng.random() < 0.5 else piece


def random_foreign(rng: Random, longest: int) -> str:
    """Return words of one script, or a mix of scripts and of English words."""
    scripts, parts, size = rng.choices(SCRIPTS, k=rng.choice((1, 1, 2, 3))), [], 0
    length = rng.randint(1, longest)
    while size < length:
        first, last = rng.choice(scripts)
        part = "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))
        if rng.random() < 0.2:
            part = random_word(rng)
        parts.append(part)
        size += len(part.encode()) + 1
    return rng.choice((" ", " ", " ", "")).join(parts) + rng.choice(("", "", "!", "?", "。", "？"))


def random_repetition(rng: Random, longest: int) -> str:
    """Return one character, syllable, word or sentence again and again."""
    length, sign = (
        rng.randint(1, longest),
        chr(rng.choice((rng.randint(0x20, 0x7E), 0x0A, rng.randint(0xA1, 0xFFFF)))),
    )
    units = (
        random_word(rng) + " ",
        random_sentence(rng) + " ",
        f"{rng.randint(0, 99)} ",
        "na",
        "ha",
    )
    unit = sign if rng.random() < 0.5 and sign.isprintable() | sign.isspace() else rng.choice(units)
    return (unit * length).encode()[:length].decode(errors="ignore")


def random_noise(rng: Random, longest: int) -> str:
    """Return random characters, repeated characters or words, numbers, code or JSON."""
    length = rng.randint(1, longest)
    kind = rng.randrange(8)
    if kind == 0:
        return "".join(rng.choices(string.printable, k=length))
    if kind == 1:
        signs = rng.choice(
            (string.ascii_letters + string.digits, string.digits, string.punctuation, "01")
        )
        return "".join(rng.choices(signs, k=length))
    if kind == 2:
        return random_repetition(rng, length)
    if kind == 3:
        numbers = (str(rng.randint(0, rng.choice((9, 99, 999)))) for _ in range(length // 3 + 1))
        return rng.choice((" ", ", ", ",", "\n", "-")).join(numbers)
    if kind == 4:
        first = rng.randint(0, 200)
        return " ".join(str(number) for number in range(first, first + length // 3 + 1))
    if kind == 5:
        pairs = (f'"{random_word(rng)}": "{random_word(rng)}"' for _ in range(length // 16 + 1))
        return "{" + ", ".join(pairs) + "}"
    if kind == 6:
        name, other = random_word(rng), random_word(rng)
        return (
            f"def {name}({other}):\n    return {other} {rng.choice('+-*/%')} {rng.randint(0, 99)}"
        )
    domain = f"{random_word(rng)}.{rng.choice(('com', 'org', 'net', 'io'))}"
    return rng.choice((f"https://www.{domain}/{random_word(rng)}", f"{random_word(rng)}@{domain}"))
