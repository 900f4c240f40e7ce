"""The grammar process: translates and checks grammars within a budget of processor time and memory.

Started by `check_process.py` as `python -m modelswarm_gateway.generation.grammar.check_worker FD SECONDS`. One request
at a time: JSON with `kind`, `text`, `whitespace`, `markers` and `parts`. The answer is JSON with `grammar` or
`refused`, and with the place of the `part` to blame. The kernel limits its time and memory. Has no threads of its own.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from modelswarm_gateway.generation.grammar.source import GrammarKind
from modelswarm_gateway.generation.grammar.translation import compile_source, one_sentence
from modelswarm_gateway.models.model_worker import OUT_OF_MEMORY, limit_memory, prepare_process
from modelswarm_gateway.models.worker_messages import pack_message, receive_message

CPU_SECONDS = 2.0  # processor time of one request; usual ones take less than 0.01 s
MEMORY_BYTES = 512 << 20  # address space of the process


def answer_request(request: dict[str, Any]) -> dict[str, Any]:
    where: dict[str, Any] = {}
    try:
        for place, (kind, text) in enumerate(request["parts"]):
            where = {"part": place}
            compile_source(GrammarKind(kind), text, "")
        where = {}
        grammar = compile_source(
            GrammarKind(request["kind"]),
            request["text"],
            request["whitespace"],
            request["markers"],
        )
    except UnicodeEncodeError:
        return {"refused": "it has half of a surrogate pair, which is not a character"} | where
    except (ValueError, RecursionError) as error:  # GrammarError, and llguidance's own
        return {"refused": one_sentence(str(error))} | where
    return {"grammar": grammar}


def serve(connection: socket.socket, cpu_seconds: float) -> None:
    """Answer requests until the gateway closes its end."""
    while (message := receive_message(connection)) is not None:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        answer = answer_request(message[0])
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.sendall(pack_message(answer))


def main() -> None:
    prepare_process()
    limit_memory(MEMORY_BYTES)
    try:
        serve(socket.socket(fileno=int(sys.argv[1])), float(sys.argv[2]))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)


if __name__ == "__main__":
    main()
