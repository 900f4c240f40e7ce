"""A span tells what its steps read in a block; heartbeats count it."""

from __future__ import annotations

from pathlib import Path

from support.models.chain import OPTIONS
from support.models.tiny_models import make_model

from modelswarm.checkpoint.facts import read_facts
from modelswarm_serving.model.base import ModelShape
from modelswarm_serving.model.transformer.startup import load_span


def shape_of(folder: Path, first: int, last: int) -> ModelShape:
    return load_span(folder, first, last, OPTIONS).shape


def test_only_a_tail_reads_more_than_its_blocks(tmp_path: Path) -> None:
    """Servers of as many blocks are compared with each other, but tails only with tails."""
    folder = make_model(tmp_path, "llama")
    facts = read_facts(folder, (0, 4))
    block, head = 4 * facts.block_elements, 4 * facts.embedding_elements
    found = [shape_of(folder, *blocks).block_bytes for blocks in ((0, 2), (1, 2), (2, 4))]
    assert found == [block, block, block + head // 2]


def test_windows_are_those_of_the_blocks(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "gemma2")
    windows = shape_of(folder, 0, 4).windows
    assert None in windows and len(set(windows)) == 2
    assert shape_of(folder, 1, 3).windows == windows[1:3]
