"""The description of one model family: its tensors, and the fields of config.json that give their shapes.

A shape is a text such as `num_attention_heads*head_dim hidden_size`: dimensions apart by spaces, each a sum of products
of fields and numbers. So one text gives the numbers and the words of an error. Knows no files and no torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Shapes: TypeAlias = Mapping[str, str]
"""Name of a tensor within a block -> its shape. A `*` in the name stands for the number of an expert."""
Default: TypeAlias = int | bool | str | None
"""Value of a field that config.json leaves out; a text is a sum of products, as in shapes."""


class BlockPath(enum.Enum):
    """The code that runs a block of the family."""

    FUSED = "fused"  # our own block of few calls, compared with transformers' at every start
    GENERIC = "generic"  # transformers' own forward with our paged attention


@dataclass(frozen=True, slots=True)
class Tables:
    """Names of the tensors beside the blocks, as the causal language model of transformers has them."""

    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens.weight"
    positions: str | None = None  # table of learned positions
    position_rows: str = "max_position_embeddings"  # its rows
    embedding_norm: tuple[str, ...] = ()
    norm: tuple[str, ...] = ("model.norm.weight",)
    head: str = "lm_head.weight"

    @property
    def head_names(self) -> frozenset[str]:
        """Names of the tensors that turn tokens into rows."""
        positions = () if self.positions is None else (self.positions,)
        return frozenset({self.embedding, *positions, *self.embedding_norm})

    @property
    def names(self) -> frozenset[str]:
        return self.head_names | {*self.norm, self.head}


LLAMA_TABLES = Tables()


@dataclass(frozen=True, slots=True)
class Family:
    """One family. Fields have the names that transformers has in common for all families."""

    name: str
    architecture: str  # the class in `architectures`
    defaults: Mapping[str, Default]  # of the fields that config.json may leave out
    block: Shapes  # tensors of every block
    optional: Mapping[str, Shapes] = field(default_factory=dict)
    """Field, or `!` and a field -> tensors that a block has as well if the field is set, or not set."""
    mlp: Shapes = field(default_factory=dict)  # tensors of the blocks without experts
    experts: Shapes = field(default_factory=dict)  # tensors of the blocks with experts
    expert_count: str = ""  # field with the number of experts
    ranked_experts: int = 0  # best experts by which a group of them is ranked; 0: no groups
    has_experts: Callable[[Mapping[str, Any], int], bool] = lambda _values, _block: True
    tables: Tables = LLAMA_TABLES
    path: BlockPath = BlockPath.GENERIC
    tied: bool = False  # default of `tie_word_embeddings`
    kv: str = "2*num_key_value_heads*head_dim"  # elements of one position in one block
    is_latent: bool = False  # keys and values are one vector, which all heads share
    quantisation: str = ""  # the only `quant_method` that is read, as weights of the model's format
    spare_blocks: str = (
        ""  # field with the number of further blocks in the files, which are left out
    )
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Common name of a field -> other names that it has in config.json."""
    derive: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _values: {}
    """Returns further fields, from those of config.json."""
    limits: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field -> the only values that are served; a missing field is served."""
    absent: tuple[str, ...] = ()
    """Fields that config.json must not have, with any value."""
    equal: Mapping[str, str] = field(default_factory=dict)
    """Field -> the field whose value it must have."""
    unused: tuple[str, ...] = ("self_attn.rotary_emb.inv_freq",)
    """Endings of tensors in older checkpoints that have no effect: they are computed anew."""
    activation: str = "hidden_act"  # name of the field; empty: there is none
    is_rotary: bool = True
    has_window: bool = True  # some models of the family have a sliding window
    is_windowed: bool = False  # one model has blocks with and blocks without a sliding window
    has_score_tables: bool = False  # attention scores are changed, so they are in memory
    heads_divide_hidden: bool = False  # transformers asks it even if `head_dim` is given
    is_ported: bool = False
    """Published with code of its own, which transformers has under the same names of classes."""
    nested: bool = False  # config.json holds the text model under `text_config`
    refused: tuple[str, ...] = ()  # parts of the family that are not served, for docs/models.md


QUERY_ROWS = "num_attention_heads*head_dim"
KEY_ROWS = "num_key_value_heads*head_dim"
ATTENTION: Shapes = {
    "self_attn.q_proj.weight": f"{QUERY_ROWS} hidden_size",
    "self_attn.k_proj.weight": f"{KEY_ROWS} hidden_size",
    "self_attn.v_proj.weight": f"{KEY_ROWS} hidden_size",
    "self_attn.o_proj.weight": f"hidden_size {QUERY_ROWS}",
}
QKV_BIAS: Shapes = {
    "self_attn.q_proj.bias": QUERY_ROWS,
    "self_attn.k_proj.bias": KEY_ROWS,
    "self_attn.v_proj.bias": KEY_ROWS,
}
ALL_BIAS: Shapes = {**QKV_BIAS, "self_attn.o_proj.bias": "hidden_size"}
HEAD_NORMS: Shapes = {"self_attn.q_norm.weight": "head_dim", "self_attn.k_norm.weight": "head_dim"}
MLP: Shapes = {
    "mlp.gate_proj.weight": "intermediate_size hidden_size",
    "mlp.up_proj.weight": "intermediate_size hidden_size",
    "mlp.down_proj.weight": "hidden_size intermediate_size",
}
MLP_BIAS: Shapes = {
    "mlp.gate_proj.bias": "intermediate_size",
    "mlp.up_proj.bias": "intermediate_size",
    "mlp.down_proj.bias": "hidden_size",
}
NORMS: Shapes = {
    "input_layernorm.weight": "hidden_size",
    "post_attention_layernorm.weight": "hidden_size",
}


def biased(shapes: Shapes) -> Shapes:
    """Return weights [out, in] together with the bias of each."""
    biases = {name.replace(".weight", ".bias"): shape.split()[0] for name, shape in shapes.items()}
    return {**shapes, **biases}
