"""Options of `modelswarm demo`. The steps are in `modelswarm.cli.demo`."""

from __future__ import annotations

from pathlib import Path

import click

QUESTION = "Count from 1 to 200."


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option("--question", default=QUESTION, show_default=True, help="Question to the model.")
@click.option("--hash-model", is_flag=True, help="Run a hash function as the model, for tests.")
@click.option("--json", "as_json", is_flag=True, help="Print only the result, as a line of JSON.")
def demo(file: Path | None, question: str, hash_model: bool, as_json: bool) -> int:
    """Show that a stream survives the kill of a server.

    Starts a swarm, asks a question and kills a server in the middle of the answer. Then the answer is compared with
    that of a run without a kill.

    FILE is a swarm document with two or more servers per span. Default: the project's example.
    """
    from modelswarm.cli.demo.demo import run_demo

    return run_demo(file, question, hash_model, as_json)
