"""The template process: compiles and renders templates within a budget of processor time and memory.

Started by `template_process.py` as `python -m modelswarm_gateway.models.template_worker FD SECONDS`, with one end of a
pair of sockets. One request at a time: JSON with `template` and, to render, `variables`; the answer is JSON with
`text` or `refused`. The kernel ends a process that exceeds its processor time, whatever its interpreter does meanwhile.
The process ends itself when it has too little memory, and when the gateway has ended. Has no threads.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import sys
from functools import lru_cache
from typing import Any

from modelswarm_gateway.models.chat_template import ChatTemplate, TemplateError

CPU_SECONDS = 2.0  # processor time of one request; usual ones take less than 0.01 s
MEMORY_BYTES = 512 << 20  # address space of the process
MAX_TEXT_CHARACTERS = 16 << 20  # of a prompt; the longest context has fewer
MAX_REASON_CHARACTERS = 1000  # of a refusal, whose words a template may choose
OUT_OF_MEMORY = 3  # exit code
_LENGTH_BYTES = 4
_MAX_MESSAGE_BYTES = 128 << 20  # of JSON; a prompt's characters may take six bytes each


def send_message(connection: socket.socket, message: dict[str, Any]) -> int:
    """Send JSON with its length before it; return its number of bytes."""
    content = json.dumps(message).encode()
    connection.sendall(len(content).to_bytes(_LENGTH_BYTES) + content)
    return len(content)


def receive_message(connection: socket.socket) -> bytes | None:
    """Return the next message; None if the other end is closed or sends no message."""
    size = _receive(connection, _LENGTH_BYTES)
    if size is None or int.from_bytes(size) > _MAX_MESSAGE_BYTES:
        return None
    return _receive(connection, int.from_bytes(size))


def _receive(connection: socket.socket, size: int) -> bytes | None:
    content = bytearray()
    while len(content) < size:
        part = connection.recv(min(size - len(content), 1 << 20))
        if not part:
            return None
        content += part
    return bytes(content)


def answer_request(content: bytes) -> dict[str, Any]:
    """Return the prompt, or the reason why there is none. Without variables the template is only compiled."""
    try:
        request = json.loads(content)
        template = _compile(request["template"])
        if "variables" not in request:
            return {"text": ""}
        text = template.render(request["variables"])
    except TemplateError as error:
        return {"refused": str(error)[:MAX_REASON_CHARACTERS]}
    except RecursionError:
        return {"refused": "the messages are nested too deeply"}
    if len(text) > MAX_TEXT_CHARACTERS:
        detail = f"{len(text)} characters; allowed: {MAX_TEXT_CHARACTERS}"
        return {"refused": f"the model's chat template makes a prompt of {detail}"}
    return {"text": text}


@lru_cache(maxsize=64)
def _compile(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def limit_process() -> None:
    if sys.platform == "linux":  # macOS refuses a limit below the address space of any process
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        allowed = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process


def serve(connection: socket.socket, cpu_seconds: float) -> None:
    """Answer requests until the gateway closes its end."""
    while (content := receive_message(connection)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = answer_request(content)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send_message(connection, answer)


def main() -> None:
    limit_process()
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
