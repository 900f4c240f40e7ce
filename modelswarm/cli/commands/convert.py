"""Options of `modelswarm convert STATE_DICT FOLDER`. The work is in `modelswarm.conversion`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from modelswarm.cli.options.checkpoint import model_address
from modelswarm.errors import UserError

_NEEDED = ("torch", "safetensors", "tokenizers")


@click.command()
@click.argument("state_dict", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--heads", type=click.IntRange(1), metavar="N", help="Heads of a block, if the file has none."
)
@click.option(
    "--activation",
    type=click.Choice(("gelu_new", "gelu", "relu")),
    help="Function of the blocks, if the file has none: gelu of nanoGPT, gelu_new of GPT-2 and minGPT.",
)
@click.option(
    "--tokenizer-name",
    metavar="NAME",
    help="Copy the tokenizer of another folder, or of owner/name of a hub.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the sizes as a line of JSON.")
def convert(
    state_dict: Path,
    folder: Path,
    heads: int | None,
    activation: str | None,
    tokenizer_name: str | None,
    as_json: bool,
) -> None:
    """Write a model FOLDER from a STATE_DICT of a GPT-2 shape, as torch.save writes it.

    The state dict is transformers', nanoGPT's or minGPT's, alone or under the key model or state_dict. No code of
    the file is run. FOLDER is for servers, and for generate --checkpoint-path.
    """
    package = next((each for each in _NEEDED if find_spec(each) is None), None)
    if package is not None:
        raise UserError("convert", f"needs {package}; pip install 'modelswarm[serving]'")

    from modelswarm.checkpoint.sources import resolve_config_files
    from modelswarm.cli.json_output.conversion import conversion_fields
    from modelswarm.cli.json_output.printing import print_json
    from modelswarm.conversion.gpt2 import convert_gpt2, write_model
    from modelswarm.conversion.state_file import read_state_file

    tokenizer = None
    if tokenizer_name is not None:
        tokenizer = resolve_config_files(model_address(tokenizer_name, "--tokenizer-name"))
    model = convert_gpt2(read_state_file(state_dict), heads, activation)
    write_model(model, folder, tokenizer)
    shown = conversion_fields(folder, model.config, has_tokenizer=tokenizer is not None)
    if as_json:
        print_json(shown)
        return
    click.echo(
        f"{folder}: {shown['n_blocks']} blocks of width {shown['width']} with {shown['heads']} heads, "
        f"{shown['vocab_size']} tokens, {shown['max_length']} positions, {shown['activation']}, {shown['dtype']}"
    )
