"""Kill scenarios: faults of a swarm while it answers, on either model.

Used by `test_kills.py` (transformer) and `test_kills_hash.py` (hash model), which check the answers. Every scenario
asserts that its kill had its effect. Answers are too long to end before the kill. They are cancelled after `READ_ON`
tokens more.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from support.eventually import eventually
from support.models.tiny_models import TOY_BLOCKS, VOCAB
from support.processes.http_requests import read_answers
from support.processes.streams import TOY_MODEL, Answer, Request, Stream
from support.processes.swarm import ENDLESS, Faults, Running

from modelswarm.protocol.identity import name_of
from modelswarm.protocol.messages import Sampling
from modelswarm_gateway.core.servers.health import MAX_EJECTION_TIME
from modelswarm_serving.model.hash_model import reference_tokens

HEAD, MIDDLE, TAIL = 0, 1, 3  # places in a route over four spans
PLACES = {"head": HEAD, "middle": MIDDLE, "tail": TAIL}

SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.2, seed=1234)
RULED = replace(
    SAMPLED, typical_p=0.95, presence_penalty=0.6, frequency_penalty=0.3, no_repeat_ngram_size=4,
    min_tokens=20, logit_bias=((5, 1.5), (7, -3.0)),
)  # fmt: skip
# Fields of a request for four answers with RULED's penalties and bias, over HTTP.
FOUR = {
    "n": 4, "temperature": 1, "seed": 7, "repetition_penalty": 1.2, "presence_penalty": 0.6,
    "frequency_penalty": 0.3, "logit_bias": {"5": 1.5, "7": -3.0}, "logprobs": 2, "ignore_eos": True,
    "return_token_ids": True,
}  # fmt: skip
FOUR_SAMPLED = Sampling(
    temperature=1, seed=7, repetition_penalty=1.2, presence_penalty=0.6, frequency_penalty=0.3,
    logit_bias=((5, 1.5), (7, -3.0)),
)  # fmt: skip
KEPT_SECONDS = 6.0  # seconds that an idle named session is kept in these swarms
_SWEPT_SECONDS = 120.0  # seconds until its pages are free, on a busy machine
# Seconds. A busy machine lets heartbeats be late, and each further ejection lasts twice as long.
_RETURN_SECONDS = 3 * MAX_EJECTION_TIME
READ_ON = 50  # tokens after a recovery, before an endless answer is cancelled


def prompt_of(length: int, seed: int, vocab: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(1, vocab) for _ in range(length))


def ask_until(running: Running, what: str, condition: Callable[[], bool]) -> None:
    """Ask until the condition holds, which needs work on a server that was ejected.

    Of four requests at a time none goes to a server whose round trips are some ms longer, as on a busy machine.
    """
    requests = [Request(prompt_of(5, seed, VOCAB), 5) for seed in range(32)]

    def holds() -> bool:
        running.ask_all(requests)
        return condition()

    eventually(what, holds, _RETURN_SECONDS, lambda: running.view.explain_routes().servers)


def check_four_answers(running: Running, disturb: Callable[[], object]) -> None:
    """Check four answers of the hash model with penalties, a bias and log probabilities, disturbed on their way."""
    prompt, count = prompt_of(80, 11, VOCAB), 1500
    body = FOUR | {"model": TOY_MODEL, "prompt": list(prompt), "max_tokens": count}
    url = f"http://{running.local.http}"
    calm = read_answers(url, body)
    got = read_answers(url, body, 120, disturb)
    assert got == calm
    for choice, each in enumerate(got):
        assert len(each.logprobs) == count
        sampling = replace(FOUR_SAMPLED, choice=choice)
        assert each.ids == reference_tokens(
            prompt, sampling, count, ENDLESS, n_blocks=TOY_BLOCKS, vocabulary=VOCAB
        )


def kill_in_prefill(running: Running, request: Request, place: int) -> Answer:
    """Kill when a part of the prompt has passed the whole route, before the first token."""
    running.wait_whole()
    before, rows = running.faults(), running.rows()
    stream = running.start(request)
    route = eventually("the tail has begun", lambda: _route_at_work(running, rows))
    running.kill(route[place])
    lengths = [session.length for session in running.sessions()]
    assert lengths == [len(request.prompt)], "a token was picked before the kill"
    return _answer_after(running, stream, before)


def _route_at_work(running: Running, rows: dict[str, int]) -> list[str]:
    """Return the route of the only session, once its tail has run more rows than in `rows`."""
    for session in running.sessions():
        tail = name_of(session.route[-1].peer) if session.state == "running" else ""
        if tail and running.rows(tail)[tail] > rows[tail]:
            return [hop.peer for hop in session.route]
    return []


def kill_in_decode(running: Running, request: Request, place: int, at: int) -> Answer:
    """Kill when the client has `at` tokens."""
    running.wait_whole()
    before = running.faults()
    stream = running.start(request)
    stream.wait_tokens(at)
    running.kill(running.only_session().route[place].peer)
    return _answer_after(running, stream, before)


def _answer_after(running: Running, stream: Stream, before: Faults) -> Answer:
    """Read on after the kill, check that it caused exactly one recovery, and cancel."""
    eventually("the session goes on", lambda: running.faults().resumed > before.resumed)
    answer = stream.read_and_cancel(stream.count + READ_ON)
    assert running.faults().resumed == before.resumed + 1
    return answer


def kill_between_turns(
    running: Running, first: Request, more: Sequence[int], place: int | None
) -> tuple[Answer, Answer]:
    """Run turns of one named session, with a kill before the second; `place` None: no kill."""
    running.wait_whole()
    before = running.faults()
    one = running.ask(first)
    rests = running.wait_session(lambda session: session.state == "parked")
    peer = None if place is None else rests.route[place].peer
    if peer is not None:
        running.kill(peer)
        _wait_unlinked(running, peer)
    two = running.ask(replace(first, prompt=(*one.log, *more)))
    after = running.wait_session(lambda session: session.state == "parked")
    assert after.id == rests.id
    if peer is not None:
        assert peer not in [hop.peer for hop in after.route]
    else:
        assert running.faults() == before
        assert after.route == rests.route
    running.wait_empty(KEPT_SECONDS + _SWEPT_SECONDS)
    return one, two


def kill_three_times(running: Running, request: Request, at: int, later: int) -> Answer:
    """Kill middle and tail at once, and the head `later` tokens after the recovery."""
    running.wait_whole()
    before = running.faults()
    stream = running.start(request)
    stream.wait_tokens(at)
    route = running.only_session().route
    running.kill(route[MIDDLE].peer)
    running.kill(route[TAIL].peer)
    eventually("the session goes on", lambda: running.faults().resumed > before.resumed)
    stream.wait_tokens(stream.count + later)
    between = running.faults()
    running.kill(running.only_session().route[HEAD].peer)
    eventually("it goes on again", lambda: running.faults().resumed > between.resumed)
    assert running.faults().reroutes >= before.reroutes + 2
    return stream.read_and_cancel(stream.count + READ_ON)


def kill_in_the_loop(running: Running, request: Request, at: int) -> Answer:
    """Kill a server, and then the server that replaced it in the route."""
    running.wait_whole()
    before = running.faults()
    stream = running.start(request)
    stream.wait_tokens(at)
    old = running.only_session().route[MIDDLE].peer
    running.kill(old)
    new = _wait_left(running, old)[MIDDLE]
    assert new != old
    between = running.faults()
    running.kill(new)  # no server is left for these blocks: the session is held until one restarts
    eventually("it is rerouted again", lambda: running.faults().reroutes > between.reroutes)
    eventually("the session goes on", lambda: running.only_session().state == "running")
    answer = stream.read_and_cancel(stream.count + READ_ON)
    after = running.faults()
    assert after.reroutes >= before.reroutes + 2
    assert after.resumed > before.resumed
    return answer


def kill_under_many(
    running: Running, requests: Sequence[Request], place: int, at: int
) -> list[Answer]:
    """Run all requests at once. Kill the busiest server of a place, then the busiest one of the next place."""
    running.wait_whole()
    before = running.faults()
    streams = [running.start(request) for request in requests]
    for stream in streams:
        stream.wait_tokens(at)
    _kill_busiest(running, place)
    _wait_all_on(streams, at + 5)
    _kill_busiest(running, (place + 1) % (TAIL + 1))
    wanted = before.resumed + len(requests) // 2
    eventually("sessions go on", lambda: running.faults().resumed >= wanted, explain=running.faults)
    counts = [stream.count for stream in streams]
    return [
        stream.answer() if stream.request.stop else stream.read_and_cancel(count + READ_ON)
        for stream, count in zip(streams, counts, strict=True)
    ]


def with_stop(running: Running, request: Request, after: float = 0.6) -> Request:
    """Return the request with a stop string that first occurs in its answer after the share `after` of the text."""
    text = running.calm(request).text
    for start in range(int(len(text) * after), len(text) - 2):
        found = text[start : start + 2]
        if found.isascii() and found.isprintable() and found not in text[:start]:
            return replace(request, stop=(found,))
    raise AssertionError(f"nothing in {text!r} can be a stop string")


def _kill_busiest(running: Running, place: int) -> None:
    """Kill the server of a place that has the most running sessions."""
    routes = [session.route for session in running.sessions() if session.state == "running"]
    busy = Counter(route[place].peer for route in routes if len(route) > place)
    running.kill(busy.most_common(1)[0][0])


def _wait_all_on(streams: Sequence[Stream], count: int) -> None:
    for stream in streams:
        if not stream.done:
            stream.wait_tokens(count)


def _wait_left(running: Running, peer: str) -> list[str]:
    """Wait until the only session runs without that server; return its new route."""
    session = running.wait_session(
        lambda session: (
            session.state == "running" and peer not in [hop.peer for hop in session.route]
        )
    )
    return [hop.peer for hop in session.route]


def _wait_unlinked(running: Running, peer: str) -> None:
    eventually(
        f"the gateway no longer shows {peer}",
        lambda: peer not in {server.peer for server in running.view.fetch_snapshot().servers},
    )
