"""`active_adapter` of Petals: the whole model of a swarm with one of its LoRA adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.adapters import generate_with, make_adapter
from support.models.tiny_models import make_model
from support.processes.swarm import local_settings, running_swarm

from modelswarm import AutoDistributedModelForCausalLM
from modelswarm.client.hf.errors import ArgumentError


def test_active_adapter_generates_what_peft_generates(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    adapters = {"law": make_adapter(folder, tmp_path / "law")}
    load = AutoDistributedModelForCausalLM.from_pretrained
    settings = local_settings("active")
    with running_swarm(
        folder, "active", spans=2, length=64, settings=settings, adapters=adapters
    ) as swarm:
        for name in (None, "law"):
            chosen: dict[str, Any] = {} if name is None else {"active_adapter": name}
            model = load(folder, gateway=swarm.local.grpc, **chosen)
            ids = torch.tensor([[5, 6, 7, 8]])
            made = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
            right = generate_with(folder, adapters.get(name or ""), ids.tolist(), 12)
            assert made.tolist() == right
        with pytest.raises(ArgumentError, match="'tax' is not one of toy; allowed: 'law'"):
            load(folder, gateway=swarm.local.grpc, active_adapter="tax")
