"""The counting model that ships with ModelSwarm, addressed as `demo://counting`.

Used by checkpoint sources, examples and tests. `tools/train_demo_model.py` makes the folder.
"""

from pathlib import Path


def counting_folder() -> Path:
    """Return the Hugging Face folder: LlamaForCausalLM, 8 blocks, two shards, tokenizer, chat template."""
    return Path(__file__).parent / "counting"
