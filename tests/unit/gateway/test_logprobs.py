"""Log probabilities belong to the shown text, and tokens to their bytes."""

from __future__ import annotations

from support.eventually import SECONDS
from support.gateway_service import make_service_with_files
from support.models.tokenizers import (
    BYTES_FROM,
    encode_bytes,
    make_tokenizer,
    model_files,
    sentencepiece_like,
)

from modelswarm.protocol.messages import Finish, PromptLogprob, Sampling, TopLogprob, Turn
from modelswarm_gateway.api.http.logprobs_json import TokenNames, completion_logprobs, token_text
from modelswarm_gateway.backend.token_stream import TokenEvent
from modelswarm_gateway.core.interface.turn import ParkedTurn, TokenLogprobs, TurnRequest
from modelswarm_gateway.generation.generation import Generation, TurnStart
from modelswarm_gateway.generation.output.logprobs import LogprobsBuffer, TokenLogprob
from modelswarm_gateway.generation.request import GenerationRequest, TokenPrompt
from modelswarm_gateway.generation.resumption import LogMark, ResumedTurn, resume_turn
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from tools.dashboard.metric_registries import MODEL


def event(token: int) -> TokenEvent:
    return TokenEvent(0, token, Finish.NONE, -float(token))


def test_parts_of_a_character_are_released_with_it() -> None:
    buffer = LogprobsBuffer()
    buffer.add_token(event(1), "")
    assert buffer.release("") == []
    buffer.add_token(event(2), "é")
    assert [(e.token, e.offset) for e in buffer.release("é")] == [(1, 0), (2, 0)]


def test_withheld_text_keeps_its_tokens_until_shown() -> None:
    buffer = LogprobsBuffer()
    for token, piece in enumerate(("ab", "c", "d")):
        buffer.add_token(event(token), piece)
    assert [e.token for e in buffer.release("abc")] == [0, 1]
    assert buffer.release("") == []
    assert [e.token for e in buffer.release("", is_last=True)] == [2]


def test_byte_level_tokens_are_their_bytes() -> None:
    found = make_tokenizer()
    assert [found.token_bytes(BYTES_FROM + byte) for byte in range(256)] == [
        bytes([byte]) for byte in range(256)
    ]
    assert found.token_bytes(2) == b"<|end|>"
    assert found.token_bytes(100_000) == b""


def test_sentencepiece_tokens_have_blanks_and_bytes() -> None:
    tokenizer = sentencepiece_like()
    found = make_tokenizer(model_files() | {"tokenizer.json": tokenizer.to_str().encode()})
    ids = tokenizer.get_vocab()
    assert found.token_bytes(ids["▁Hello"]) == b" Hello"
    assert found.token_bytes(ids["<0xE2>"]) == b"\xe2"


def test_completion_names_parts_of_characters_as_openai_does() -> None:
    table = {1: b"a", 2: b"\xe2\x82"}
    entry = TokenLogprob(2, -0.5, (TopLogprob(1, -0.25),), 7)
    assert token_text(2, table.__getitem__) == "bytes:\\xe2\\x82"
    made = completion_logprobs([entry], TokenNames(table.__getitem__))
    assert {name: list(values) for name, values in made.items()} == {
        "text_offset": [7],
        "token_logprobs": [-0.5],
        "tokens": ["bytes:\\xe2\\x82"],
        "top_logprobs": [{"a": -0.25, "bytes:\\xe2\\x82": -0.5}],
    }


def test_resume_generates_tokens_again_whose_logprobs_are_lost() -> None:
    turn = Turn(9, 10, Sampling(logprobs=1), begin=2)
    kept = {4: TokenLogprobs(-0.5), 5: TokenLogprobs(-0.75)}
    parked = ParkedTurn((5, 6, 8, 9, 10, 11, 12), turn, kept)
    mark = str(LogMark((5, 6, 8, 9)))
    assert resume_turn((5, 6), parked, 3, mark).generated == (8, 9, 10, 11, 12)
    resumed = resume_turn((5, 6), parked, 3, mark, needs_logprobs=True)
    assert resumed.generated == (8, 9, 10, 11)
    assert [e.logprob for e in resumed.token_events(2)][2:] == [-0.5, -0.75]


async def test_resumed_answer_has_the_entries_of_half_characters() -> None:
    service, node = await make_service_with_files(model_files())
    card = node.model_card(MODEL)
    assert card is not None and card.tokenizer is not None
    prompt, generated = tuple(encode_bytes("x")), tuple(encode_bytes("é!?"))
    kept = {at: TokenLogprobs(-float(at)) for at in range(1, 5)}
    resumed = ResumedTurn(prompt, 3, generated, Turn(9, 9, Sampling(), begin=1), kept)
    options = SamplingOptions(logprobs=0)
    request = GenerationRequest(MODEL, TokenPrompt(prompt), "prompt", options, session_id="s")
    turn = TurnRequest(prompt, 8, Sampling(), keeps_logprobs=True)
    start = TurnStart(turn, card.tokenizer, 0.0, resumed=resumed)
    generation = Generation(service._context, request, start)
    assert [entry.token for entry in generation.seen.logprobs] == list(generated[:3])
    chunk = await generation.next_chunk(SECONDS)
    assert chunk is not None
    assert [entry.token for entry in chunk.logprobs] == list(generated[3:])
    generation.close()


def test_echoed_prompt_has_the_alternatives_of_the_answer() -> None:
    """`prompt_logprobs` beside `echo` may ask for more of them."""
    top = tuple(TopLogprob(token, -1.0) for token in range(5))
    buffer = LogprobsBuffer()
    buffer.add_prompt(7, None, "a", 2)
    buffer.add_prompt(8, PromptLogprob(8, -0.5, top), "b", 2)
    assert [len(entry.top) for entry in buffer.release("ab")] == [0, 2]
