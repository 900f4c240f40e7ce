"""Attention of the families that do not call transformers' interface, or whose pages have a layout of their own.

`loading.py` calls `adapt_attention` once per span. BLOOM and Falcon get a small module in place of theirs. DeepSeek's
keeps the latent vectors in the pages: 576 numbers per position instead of 40,960 in DeepSeek-V3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

from modelswarm.checkpoint.families.family import Family
from modelswarm.errors import ModelSourceError
from modelswarm_serving.model.attention.attention import ATTENTION_NAME, attend

LATENT_NAME = "modelswarm_paged_latent"


def attention_name(family: Family) -> str:
    """Return the attention with which transformers builds the model: Falcon refuses names that it does not know."""
    if family.is_latent:
        return LATENT_NAME
    return "sdpa" if family.name == "falcon" else ATTENTION_NAME


def adapt_attention(family: Family, layers: Sequence[Any], config: Any) -> None:
    """Let the blocks of a span use the pages, where their own attention does not."""
    if family.name in _MODULES:
        config._attn_implementation = ATTENTION_NAME  # so no mask is made
        for index, layer in enumerate(layers):
            layer.self_attention = _MODULES[family.name](layer.self_attention, index)
    if family.is_latent:
        for layer in layers:
            if not hasattr(layer.self_attn, "expand_kv"):
                raise ModelSourceError("model", f"{family.name} needs a newer transformers")
            layer.self_attn.expand_kv = _keep_latent


class BloomAttention(nn.Module):
    """BLOOM's attention: a bias that grows with the distance, a slope per head."""

    slopes: Tensor

    def __init__(self, module: Any, index: int) -> None:
        super().__init__()
        self.query_key_value, self.dense = module.query_key_value, module.dense
        self._heads, self._size, self._index = module.num_heads, module.head_dim, index
        mask = torch.ones(1, 2, device=self.dense.weight.device)
        slopes = build_alibi_tensor(mask, self._heads, torch.float32)[:, 0, 1].contiguous()
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(self, hidden_states: Tensor, residual: Tensor, **_: Any) -> tuple[Tensor, None]:
        qkv = self.query_key_value(hidden_states[0]).view(-1, self._heads, 3, self._size)
        fresh = qkv[:, :, 1:].transpose(1, 2)
        out = attend(
            self._index,
            qkv[:, :, 0],
            fresh,
            self._size**-0.5,
            None,
            None,
            slopes=self.slopes,
        )
        return self.dense(out.reshape(1, len(out), -1)) + residual, None


class FalconAttention(nn.Module):
    """Falcon's attention, in both layouts: each group has some queries, one key and one value."""

    def __init__(self, module: Any, index: int) -> None:
        super().__init__()
        self.query_key_value, self.dense = module.query_key_value, module.dense
        self._kv_heads, self._size, self._index = module.num_kv_heads, module.head_dim, index

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> tuple[Tensor, None]:
        rows = self.query_key_value(hidden_states[0])
        groups = rows.view(len(rows), self._kv_heads, -1, self._size)
        query, key = groups[:, :, :-2].flatten(1, 2), groups[:, :, -2]
        cos, sin = position_embeddings
        turned = apply_rotary_pos_emb(  # type: ignore[no-untyped-call]
            query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin
        )
        query, key = (each[0].transpose(0, 1) for each in turned)
        fresh = torch.stack((key, groups[:, :, -1]), dim=1)
        out = attend(self._index, query, fresh, self._size**-0.5, None, None)
        return self.dense(out.reshape(1, len(out), -1)), None


_MODULES = {"bloom": BloomAttention, "falcon": FalconAttention}


def _keep_latent(latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents [1, 1, T, rank] and turned keys [1, 1, T, D] in place of the keys and values of all heads."""
    return torch.cat((latent, turned), dim=-1), latent


def latent_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend over latent vectors (MLA): query [1, heads, T, D], key [1, 1, T, rank + turned].

    The projection of keys is applied to the queries instead, and that of values to the result.
    """
    heads, plain, rank = query.shape[1], module.qk_nope_head_dim, module.kv_lora_rank
    weight = module.kv_b_proj.weight.view(heads, -1, rank)
    straight = query[0, :, :, :plain] @ weight[:, :plain]
    latent_query = torch.cat((straight, query[0, :, :, plain:]), dim=-1).transpose(0, 1)
    fresh = key[0, 0][:, None, None]
    out = attend(module.layer_idx, latent_query, fresh, scaling, None, None)
    values = out[..., :rank].transpose(0, 1) @ weight[:, plain:].transpose(1, 2)
    return values.transpose(0, 1).unsqueeze(0), None


AttentionInterface.register(LATENT_NAME, latent_attention)
