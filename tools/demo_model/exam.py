"""Examines the demo model: whole answers, token for token, and the margin of each right token.

    python -m tools.demo_model.exam                  # the shipped weights
    python -m tools.demo_model.exam FOLDER --seed 8  # other weights, other random questions

Greedy decoding gives exactly the answer if, and only if, every token of the answer is the most
likely one after the right prefix. So one forward pass examines a whole chat. The answer that the
model gives instead is generated for each wrong one, and printed. The exit status is 1 then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import torch
from transformers import LlamaForCausalLM

from tools.demo_model.packing import IGNORED, Chat
from tools.demo_model.questions import Question, all_questions
from tools.demo_model.text import BEGIN, CONTEXT, END, FIRST_BYTE, encode

ROOT: Final = Path(__file__).resolve().parents[2]
BATCH_TOKENS: Final = 8192
SHOWN_CHARACTERS: Final = 100


@dataclass(slots=True)
class Mark:
    """The marks of one subject. `margin` is the smallest one of a right answer, in logits."""

    right: int = 0
    asked: int = 0
    margin: float = float("inf")
    wrong: list[Question] = field(default_factory=list)

    def add(self, question: Question, margin: float) -> None:
        self.asked += 1
        if margin > 0:
            self.right += 1
            self.margin = min(self.margin, margin)
        else:
            self.wrong.append(question)


def grade(model: LlamaForCausalLM, questions: Iterable[Question]) -> dict[str, Mark]:
    """Return the marks by subject. A question is right if the model gives one of its answers."""
    asked = list(questions)
    texts = [(index, chat) for index, question in enumerate(asked) for chat in make_chats(question)]
    margins = [float("-inf")] * len(asked)
    for batch in _batches(texts):
        for (index, _), margin in zip(
            batch, smallest_margins(model, [chat for _, chat in batch]), strict=True
        ):
            margins[index] = max(margins[index], margin)
    marks: dict[str, Mark] = {}
    for question, margin in zip(asked, margins, strict=True):
        marks.setdefault(question.subject, Mark()).add(question, margin)
    return marks


def make_chats(question: Question) -> Iterator[Chat]:
    """Yield the chat with each of the right last answers; in `targets` are all answers of the chat."""
    for answer in question.answers:
        chat = Chat()
        if question.is_plain_text:
            chat.write(encode(question.text), learned=False)
            chat.write(encode(answer), learned=True)
            yield chat
            continue
        chat.write([BEGIN], learned=False)
        for lesson in question.earlier:
            chat.write_turn(lesson)
        chat.write_question(question.text)
        chat.write([*encode(answer), END], learned=True)
        yield chat


def _batches(texts: list[tuple[int, Chat]]) -> Iterator[list[tuple[int, Chat]]]:
    """Yield batches of similar length."""
    batch: list[tuple[int, Chat]] = []
    for item in sorted(texts, key=lambda text: len(text[1].ids)):
        if batch and (len(batch) + 1) * len(item[1].ids) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(item)
    if batch:
        yield batch


@torch.no_grad()
def smallest_margins(model: LlamaForCausalLM, chats: list[Chat]) -> list[float]:
    """Return per chat the smallest (logit of the right token - best other logit); < 0: a wrong token.

    A chat beyond the context ends there, as in a server.
    """
    length = min(CONTEXT, max(len(chat.ids) for chat in chats))
    ids = torch.tensor([_fit(chat.ids, length, BEGIN) for chat in chats])
    targets = torch.tensor([_fit(chat.targets, length, IGNORED) for chat in chats])[:, 1:]
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    wanted = targets.clamp(min=0)[..., None]
    right = logits.gather(2, wanted)[..., 0]
    others = logits.scatter(2, wanted, float("-inf")).amax(2)
    margins = (right - others).masked_fill(targets == IGNORED, float("inf"))
    return [float(margin) for margin in margins.amin(1)]


def _fit(tokens: list[int], length: int, filler: int) -> list[int]:
    return [*tokens[:length], *[filler] * (length - len(tokens))]


@torch.no_grad()
def answer_of(model: LlamaForCausalLM, prompt: list[int], longest: int = 120) -> str:
    """Return the greedy answer, or its beginning."""
    ids = torch.tensor([prompt])
    longest = max(1, min(longest, CONTEXT - len(prompt)))
    new = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=longest)
    tokens = [token for token in new[0, len(prompt) :].tolist() if token >= FIRST_BYTE]
    return bytes(token - FIRST_BYTE for token in tokens).decode(errors="replace")


def prompt_of(question: Question) -> list[int]:
    chat = next(make_chats(question))
    if question.is_plain_text:
        return encode(question.text)
    return chat.ids[: len(chat.ids) - len(encode(question.answers[0])) - 1]


def format_mark(subject: str, mark: Mark) -> str:
    return f"{subject:<24} {mark.right:>4} of {mark.asked:<4} smallest margin {mark.margin:.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "modelswarm/demo/counting")
    parser.add_argument("--seed", type=int, default=7, help="of the random questions")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shown", type=int, default=6, help="wrong answers printed per subject")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = LlamaForCausalLM.from_pretrained(given.folder)
    marks = grade(model, all_questions(Random(given.seed)))
    for subject, mark in marks.items():
        print(format_mark(subject, mark))
        for question in mark.wrong[: given.shown]:
            text = repr(question.text)[:SHOWN_CHARACTERS]
            answer = repr(answer_of(model, prompt_of(question)))[:SHOWN_CHARACTERS]
            print(f"    {len(question.earlier)} turns, then {text} -> {answer}")
    wrong = sum(len(mark.wrong) for mark in marks.values())
    print(f"{sum(mark.asked for mark in marks.values())} questions, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
