"""The reference output of both models, computed without a swarm: the oracles of docs/protocol.md ("The same output").

Used by `run.py`: for the twins before the first fault, and for answers that differ from theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from support.models.tiny_models import TOY_BLOCKS, TOY_LENGTH, VOCAB
from support.processes.streams import Answer
from tokenizers import Tokenizer

from modelswarm_gateway.models.detokenizer import Detokenizer
from modelswarm_serving.model.hash_model import reference_tokens


@dataclass(frozen=True, slots=True)
class Right:
    """Checks of answers; both raise AssertionError. `settle` is None on the hash model, where any difference is wrong.

    A text is what the tokenizer makes of the tokens; an answer that does not end well may lack the last characters.
    """

    check: Callable[[Answer], None]
    settle: Callable[[Answer, Answer], None] | None  # (twin, answer that differs from it)


def right_by(model: str, folder: Path) -> Right:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return _by_hash_model(tokenizer) if model == "hash" else _by_whole_model(folder, tokenizer)


def check_text(tokenizer: Tokenizer, answer: Answer) -> None:
    """Bytes at the end of the prompt may belong to the first character."""
    pieces = Detokenizer(_Decoder(tokenizer), answer.request.prompt)
    shown = "".join(pieces.feed(token) for token in answer.tokens)
    whole = shown + pieces.flush()
    if answer.request.stop or not answer.finish:
        assert whole.startswith(answer.text), f"{answer.text!r} is no beginning of {whole!r}"
    else:
        assert answer.text == whole, f"{answer.text!r} is not {whole!r}"


@dataclass(frozen=True, slots=True)
class _Decoder:
    tokenizer: Tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(ids))
        return text


def _by_hash_model(tokenizer: Tokenizer) -> Right:
    def check(answer: Answer) -> None:
        _check_hash(answer)
        check_text(tokenizer, answer)

    return Right(check, None)


def _check_hash(answer: Answer) -> None:
    """Oracle 1. A stop string may end the answer before the reference ends."""
    request = answer.request
    end = min(TOY_LENGTH, len(request.prompt) + request.new)
    right = reference_tokens(
        request.prompt, request.sampling, request.new, end, n_blocks=TOY_BLOCKS, vocabulary=VOCAB
    )
    count = len(answer.tokens) if request.stop and answer.finish == "stop" else len(right)
    assert list(answer.tokens) == right[:count], "not what the hash model says"


def _by_whole_model(folder: Path, tokenizer: Tokenizer) -> Right:
    """Oracles 2 and 3."""
    import torch
    from support.models.tiny_models import load_whole
    from support.processes.oracles import check_tokens, check_twins

    torch.set_num_threads(1)
    model = load_whole(folder)

    def check(answer: Answer) -> None:
        check_tokens(model, answer)
        check_text(tokenizer, answer)

    def settle(twin: Answer, answer: Answer) -> None:
        check(answer)
        if answer.finish:
            check_twins(model, twin, answer)

    return Right(check, settle)
