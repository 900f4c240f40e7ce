"""The model of the kill tests: a random Llama, heavy enough that a long prompt takes a moment to read.

Also the tally of what was judged on it, apart from the oracles so that `conftest.py` needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TOY_BLOCKS = 8
TOY_LENGTH = 1024  # positions of its context


def make_toy(folder: Path) -> Path:
    from support.models.tiny_models import make_model  # torch takes seconds

    return make_model(
        folder,
        blocks=TOY_BLOCKS,
        hidden_size=128,
        intermediate_size=256,
        max_position_embeddings=TOY_LENGTH,
        initializer_range=0.1,
        shard_size="1MB",
    )


@dataclass(slots=True)
class Tally:
    """Tokens that were judged beside what the whole model says. Near ties are counted and published."""

    tokens: int = 0
    near_ties: int = 0  # rounding might change these picks
    flips: int = 0  # those that it did change


JUDGED = Tally()
"""Of this test run; `conftest.py` prints it at the end."""
