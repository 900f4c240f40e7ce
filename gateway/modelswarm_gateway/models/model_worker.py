"""The processes of one model: they tokenize texts and render prompts, within limits that the kernel enforces.

Started by `model_process.py` as `python -m modelswarm_gateway.models.model_worker FD`. This first process loads
tokenizer.json, and forks a worker for each connection that the gateway sends. A fork shares the loaded tokenizer and
takes milliseconds, so a worker that exceeded a limit is replaced at once. The kernel ends a worker that exceeds its
processor time, whatever it does meanwhile. All of them end when the gateway has ended. They have no threads.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import Tokenizer

from modelswarm.checkpoint.tokenizer import token_texts
from modelswarm.process.memory_limit import read_resident_bytes
from modelswarm_gateway.models.chat_template import ChatTemplate, TemplateError
from modelswarm_gateway.models.token_table import pack_table
from modelswarm_gateway.models.worker_messages import pack_message, receive_message

LOAD_CPU_SECONDS = 60.0  # processor time to load a tokenizer; the largest known one takes 2 s
LOAD_BYTES = 1 << 30  # address space of the process that loads a tokenizer
MAX_REASON_CHARACTERS = 1000  # of a refusal, whose words a template may choose
OUT_OF_MEMORY = 3  # exit code
# Niceness: the event loop of the gateway goes first.
NICENESS = 5
# Most characters of a text: so many for each token of the context, and `MORE_CHARACTERS`. Usual are 3 to 5.
CHARACTERS_PER_TOKEN, MORE_CHARACTERS = 16, 64 << 10
# Most characters of a text for any context: a server may state one of any length, and a text needs 230 bytes for each.
MAX_TEXT_CHARACTERS = 2 << 20
# Characters for each token of the context; above, tokens are counted in pieces first.
USUAL_CHARACTERS_PER_TOKEN = 8
# Characters of a piece: it needs about 15 MiB.
PIECE_CHARACTERS = 64 << 10
# Tokens that a cut between two pieces may add.
TOKENS_PER_CUT = 128
# A command to the first process: lane, memory of its next worker in MiB (0: no worker).
COMMAND = struct.Struct("!BI")
# Its answer: exit code of the lane's worker, which has been ended; negative for a signal.
EXIT_CODE = struct.Struct("!i")


Answer = tuple[dict[str, Any], bytes]


def too_many_characters(count: int, limit: int) -> str:
    """Return why a text with so many characters is too long for a context of `limit` positions; empty if it is not."""
    if count > MAX_TEXT_CHARACTERS:
        detail = f"{count} characters are more than {MAX_TEXT_CHARACTERS}"
        return f"{detail}; a longer prompt may be given as token ids"
    if CHARACTERS_PER_TOKEN * limit + MORE_CHARACTERS < count:
        return f"{count} characters are more than {limit} tokens can hold"
    return ""


def render(request: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """Return the prompt, or the answer with the reason why there is none. Without variables, only compile."""
    try:
        template = _compile(request["template"])
        return template.render(request["variables"]) if "variables" in request else "", None
    except TemplateError as error:
        return "", {"refused": str(error)[:MAX_REASON_CHARACTERS]}
    except RecursionError:
        return "", {"refused": "the messages are nested too deeply"}


def _text_after(text: str, before: str) -> tuple[str, dict[str, Any] | None]:
    _, found, following = text.partition(before)
    if found:
        return following, None
    detail = "does not show an answer unchanged, so messages cannot be appended; send all messages"
    return "", {"refused": f"the model's chat template {detail}"}


def _text_until(text: str, tag: str) -> tuple[str, dict[str, Any] | None]:
    """Return the text before a tag that ends with a blank, as transformers does."""
    before, found, following = text.rpartition(tag.rstrip())
    if found:
        return before if following.startswith(" ") else before.rstrip(), None
    detail = "does not show the last message, so it cannot be continued"
    return "", {"refused": f"the model's chat template {detail}"}


@lru_cache(maxsize=4)
def _compile(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def encode(tokenizer: Tokenizer, text: str, *, special: bool, limit: int) -> Answer:
    """Return the ids. Texts clearly longer than `limit` tokens are only counted, to save memory."""
    try:
        if reason := too_many_characters(len(text), limit):
            return {"too_long": reason}, b""
        is_short = len(text) <= USUAL_CHARACTERS_PER_TOKEN * limit
        if not is_short and _has_more_tokens(tokenizer, text, limit):
            return {"too_long": f"it has more than {limit} tokens"}, b""
        ids = tokenizer.encode(text, add_special_tokens=special).ids
    except MemoryError:
        raise
    except Exception as error:  # the library raises bare Exception
        return {"unencodable": str(error)[:MAX_REASON_CHARACTERS]}, b""
    return {}, array("I", ids).tobytes()


def _has_more_tokens(tokenizer: Tokenizer, text: str, limit: int) -> bool:
    start = count = 0
    while start < len(text) and count <= limit:
        end = start + PIECE_CHARACTERS
        blank = text.rfind(" ", start + 1, end) if end < len(text) else -1
        end = blank if blank > start else end
        count += len(tokenizer.encode(text[start:end], add_special_tokens=False)) - TOKENS_PER_CUT
        start = end
    return count > limit


def serve(connection: socket.socket, tokenizer: Tokenizer) -> None:
    """Answer requests until the gateway closes its end. Between rendering and encoding, tell that one has ended."""
    while (message := receive_message(connection)) is not None:
        request = message[0]
        text, answer, special = request.get("text"), None, request.get("special", False)
        if text is None:
            with limited_time(request["render_seconds"]):
                text, refusal = render(request)
                if refusal is None and (until := request.get("until")):
                    text, refusal = _text_until(text, until)
                if refusal is None and (after := request.get("after")):
                    text, refusal = _text_after(text, after)
            if refusal is not None or "limit" not in request:
                answer = (refusal or {}, b"")
            else:
                connection.sendall(pack_message({"rendered": len(text)}))
        if answer is None:
            with limited_time(request["encode_seconds"]):
                answer = encode(tokenizer, text, special=special, limit=request["limit"])
        connection.sendall(pack_message(*answer))


@contextmanager
def limited_time(cpu_seconds: float) -> Iterator[None]:
    """Let the kernel end the process after so much processor time."""
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def load(content: bytes, eos: str | None) -> tuple[Tokenizer | None, dict[str, Any], bytes]:
    """Return the tokenizer, and head and data of the answer: what the gateway keeps of it, or why it cannot be used."""
    try:
        tokenizer = Tokenizer.from_buffer(content)
    except MemoryError:
        raise
    except Exception as error:  # the library raises bare Exception for every fault of the file
        return None, {"fault": str(error)[:MAX_REASON_CHARACTERS]}, b""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    texts, fault = token_texts(tokenizer)
    if fault:
        return None, {"fault": fault}, b""
    added = tokenizer.get_added_tokens_decoder()
    decoder = tokenizer.decoder
    head = {
        "decoder": None if decoder is None else json.loads(decoder.__getstate__()),
        "size": len(texts),
        "eos": None if eos is None else tokenizer.token_to_id(eos),
        "resident": read_resident_bytes() or 0,
    }
    data = pack_table(texts, {place: token.special for place, token in added.items()})
    return tokenizer, head, data


def limit_memory(size: int | None) -> None:
    """Limit the address space to `size` bytes; None: as the process was started."""
    if sys.platform != "linux":  # macOS refuses a limit below the address space of any process
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    is_above = size is None or (hard != resource.RLIM_INFINITY and size > hard)
    resource.setrlimit(resource.RLIMIT_AS, (hard if is_above or size is None else size, hard))


def _limit_more_memory(more: int) -> None:
    """Limit the memory to `more` bytes above what the process has now."""
    if sys.platform == "linux":
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
        limit_memory(int(pages) * resource.getpagesize() + more)


def _start_worker(
    control: socket.socket, connection: socket.socket, more: int, tokenizer: Tokenizer
) -> int:
    """Fork a worker that serves `connection` and may need `more` bytes of memory; return its process id."""
    pid = os.fork()
    if pid:
        return pid
    control.close()

    def work() -> None:
        _limit_more_memory(more)
        serve(connection, tokenizer)

    _exit_after(work)


def _exit_after(work: Callable[[], object]) -> NoReturn:
    code = 1
    try:
        work()
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    except ConnectionError:
        code = 0  # the gateway has ended
    finally:
        os._exit(code)


def _end_worker(pid: int) -> int:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def manage_workers(control: socket.socket, tokenizer: Tokenizer) -> None:
    """End and start workers as the gateway says, until it closes its end; at most one for each lane."""
    workers: dict[int, int] = {}
    while True:
        command, sockets, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if not command:
            break
        lane, mebibytes = COMMAND.unpack(command)
        code = _end_worker(workers.pop(lane)) if lane in workers else 0
        if mebibytes:
            with socket.socket(fileno=sockets[0]) as connection:
                workers[lane] = _start_worker(control, connection, mebibytes << 20, tokenizer)
        control.sendall(EXIT_CODE.pack(code))
    for pid in workers.values():
        _end_worker(pid)


def run(control: socket.socket) -> None:
    message = receive_message(control)
    if message is None:
        return
    limit_memory(LOAD_BYTES)
    with limited_time(LOAD_CPU_SECONDS):
        tokenizer, head, data = load(message[1], message[0]["eos"])
    control.sendall(pack_message(head, data))
    del message, data
    if tokenizer is not None:
        limit_memory(None)  # each worker has its own limit
        manage_workers(control, tokenizer)


def prepare_process() -> None:
    """Let an exceeded processor time end the process, and the gateway's event loop go first."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    os.nice(NICENESS)
    with suppress(OSError):  # of Linux: if memory is short, the kernel ends these processes first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def main() -> None:
    prepare_process()
    control = socket.socket(fileno=int(sys.argv[1]))
    _exit_after(lambda: run(control))


if __name__ == "__main__":
    main()
