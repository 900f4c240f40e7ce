"""Turns the error that ends a command into one sentence on stderr and an exit code. Used by the entry point.

0 done, 1 failed, 2 wrong input, 70 a bug in modelswarm (EX_SOFTWARE), 130 interrupted. With `MODELSWARM_DEBUG=1` the
traceback is printed too.
"""

from __future__ import annotations

import os
import sys
import traceback

import click

from modelswarm.errors import ModelSwarmError, UnreachableError

FAILED = 1
USER_ERROR = 2
INTERNAL_ERROR = 70
INTERRUPTED = 130
DEBUG_VARIABLE = "MODELSWARM_DEBUG"


def report_failure(error: BaseException) -> int:
    """Print the sentence for an error, if it needs one, and return the exit code."""
    if isinstance(error, (click.Abort, KeyboardInterrupt)):
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        _drop_output()
        return FAILED
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exception(error)
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    sentence, code = _describe(error)
    click.echo(f"Error: {sentence}", err=True)
    return code


def exit_code_of(error: ModelSwarmError) -> int:
    return USER_ERROR if error.is_user_error else FAILED


def _describe(error: BaseException) -> tuple[str, int]:
    if isinstance(error, UnreachableError):
        from modelswarm.local.port_check import explain_answer

        return explain_answer(error.address, error.api) or str(error), FAILED
    if isinstance(error, ModelSwarmError):
        return str(error), exit_code_of(error)
    if isinstance(error, UnicodeDecodeError):
        return f"the input is not UTF-8 (byte {error.start}); allowed: text in UTF-8", USER_ERROR
    if isinstance(error, UnicodeEncodeError):
        return "the input is not UTF-8; allowed: text in UTF-8", USER_ERROR
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}", FAILED
    if isinstance(error, MemoryError):
        return "out of memory", FAILED
    kind, text = type(error).__name__, " ".join(str(error).split())
    cause = f"{kind}: {text}" if text else kind
    return (
        f"a bug in modelswarm: {cause} (run with {DEBUG_VARIABLE}=1 for the traceback)",
        INTERNAL_ERROR,
    )


def _drop_output() -> None:
    """Send further output to nowhere: its reader has closed it (`| head`), and Python flushes again at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
