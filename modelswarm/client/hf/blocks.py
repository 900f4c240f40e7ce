"""The blocks of a model by their names in transformers, and the modules that the model has beside them.

`model.model.layers`, `model.transformer.h` and so on are on the servers. Embeddings, the last norm and the head are
loaded here from the checkpoint when one of them is asked for first. They are transformers' own model of the family with
one module in place of all blocks. So scales, learned positions and soft caps are those of transformers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor, nn

from modelswarm.checkpoint.families.family import Tables
from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.checkpoint.hub import HUB_SCHEME
from modelswarm.checkpoint.sources import resolve
from modelswarm.checkpoint.tensor_index import INDEX_FILE, SINGLE_FILE, read_tensors, shard_names
from modelswarm.checkpoint.tensor_names import canonical_name
from modelswarm.client.hf.inputs import check_training_mask
from modelswarm.client.hf.layers import RemoteLayers
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.client.sessions.session import Prefix
from modelswarm.client.tensors import pack_rows
from modelswarm.client.training.prompts import NAMES, SoftPrompts
from modelswarm.errors import ModelSourceError, UnavailableError

_hf: Any = import_module("transformers")
# Families whose forward takes the first element of what a block returns.
_TUPLES = frozenset({"bloom", "falcon"})
# The end of each sentence about weights that cannot be read.
_LOCAL_NEED = (
    "embeddings, norm and head run at the client and are not fetched from a gateway; give from_pretrained a folder or "
    "a name on the hub that has their weights"
)

# Runs all blocks, for a forward in this thread.
RUN_BLOCKS: ContextVar[Callable[[Tensor], Tensor]] = ContextVar("blocks")


class _AllBlocks(nn.Module):
    """Stands for all blocks of a model in the forward of transformers."""

    def __init__(self, *, returns_tuple: bool) -> None:
        super().__init__()
        self._returns_tuple = returns_tuple

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        found = RUN_BLOCKS.get()(hidden_states)
        return (found,) if self._returns_tuple else found


class Blocks:
    """The blocks of one model, and its local modules, which are loaded once."""

    def __init__(
        self,
        connection: Connection,
        served: ServedModel,
        source: str,
        config: Any,
        options: Mapping[str, Any],
    ) -> None:
        """`source` and `options`: where the checkpoint is, as for transformers' from_pretrained."""
        self._connection, self._served = connection, served
        self._source, self._config, self._options = source, config, options
        self.tables: Tables = FAMILIES[config.get_text_config().model_type].tables
        self._local: Any = None
        self._device = torch.device("cpu")  # of the local modules
        self.prompts: SoftPrompts | None = None  # those that are trained

    def prefix(self) -> Prefix | None:
        """Return the soft prompt as rows before the tokens of a session; None: there is none.

        Raise UnavailableError for prompts of blocks while a server, or the gateway, is too old for them.
        """
        if self.prompts is None:
            return None
        served, rows, deep = self._known_model(), self.prompts.first, self.prompts.deep
        if deep is None:
            return Prefix(len(rows), served, pack_rows(rows, served))
        if not served.takes_block_rows:
            self._served = served = self._connection.list_models().get(served.name, served)
        if not served.takes_block_rows:
            detail = f"the gateway, or a server of {served.name}, is older than 2.4"
            raise UnavailableError(f"'deep_ptune' does not generate: {detail}", 1.0)
        chains = torch.cat((rows[:, None], deep.transpose(0, 1)), dim=1)
        return Prefix(len(rows), served, pack_rows(chains, served), has_block_rows=True)

    @property
    def layers(self) -> RemoteLayers:
        """All blocks. Raise UnavailableError while no server of the model is linked."""
        served = self._known_model()
        return RemoteLayers(self._connection, served, 0, served.n_blocks)

    @property
    def local(self) -> Any:
        """transformers' model without its blocks. Raise ModelSourceError if its weights cannot be read."""
        if self._local is None:
            dtype: torch.dtype = getattr(torch, self._known_model().dtype)
            made = load_local_modules(self._source, self._config, dtype, self._options)
            self._local = made.to(self._device)
        return self._local

    def move(self, device: torch.device) -> None:
        """Put the local modules on a device, also those that are loaded later."""
        self._device = device
        if self._local is not None:
            self._local.to(device)

    def _known_model(self) -> ServedModel:
        if not self._served.hidden_size:
            self._served = self._connection.list_models().get(self._served.name, self._served)
        if not self._served.hidden_size:
            detail = "its servers are not linked, are older than 2.2, or have no weights"
            raise UnavailableError(f"rows of {self._served.name} are not known: {detail}", 1.0)
        return self._served

    @torch.no_grad()
    def forward(self, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return logits and hidden states as transformers does: before each block, and after the norm."""
        local, states = self.local, []

        def run(hidden: Tensor) -> Tensor:
            for layer in self.layers:
                states.append(hidden)
                hidden = layer(hidden, mask)
            norm = local.get_submodule(self.tables.norm[0].rpartition(".")[0])
            states.append(norm(hidden))
            return hidden

        given: dict[str, Any] = {"attention_mask": mask, "use_cache": False}
        if mask is not None and "position_ids" in inspect.signature(local.forward).parameters:
            given["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        token = RUN_BLOCKS.set(run)
        try:
            logits = local(ids, **given).logits
        finally:
            RUN_BLOCKS.reset(token)
        return logits.float(), tuple(states)

    def forward_tuned(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Return logits [batch, length, vocabulary] in float32 behind the soft prompt, with gradients.

        `mask` [batch, length]: 0 for padding, on either side, whose logits mean nothing.
        """
        local, prompts = self.local, self.prompts
        embedded = local.get_input_embeddings()(ids)
        keep = torch.ones_like(ids) if mask is None else mask
        before, deep = 0, None
        if prompts is not None:
            before, deep = prompts.rows, prompts.deep
            first = prompts.first.to(embedded).expand(len(ids), -1, -1)
            embedded = torch.cat((first, embedded), dim=1)
            keep = torch.cat((keep.new_ones(len(ids), before), keep), dim=1)
        given: dict[str, Any] = {"attention_mask": keep, "use_cache": False}
        if "position_ids" in inspect.signature(local.forward).parameters:
            given["position_ids"] = (keep.long().cumsum(-1) - 1).clamp(min=0)
        token = RUN_BLOCKS.set(lambda hidden: self.layers(hidden, keep, deep))
        try:
            logits: Tensor = local(inputs_embeds=embedded, **given).logits
        finally:
            RUN_BLOCKS.reset(token)
        return logits[:, before:].float().contiguous()


class _Body:
    """`model.model`: the path to the blocks, and the modules beside them."""

    def __init__(self, blocks: Blocks, path: str) -> None:
        self._blocks, self._path = blocks, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in NAMES and self._blocks.prompts is not None:
            return getattr(self._blocks.prompts, name)
        path = f"{self._path}.{name}"
        if path == self._blocks.tables.blocks:
            return self._blocks.layers
        if self._blocks.tables.blocks.startswith(f"{path}."):
            return _Body(self._blocks, path)
        return getattr(self._blocks.local.get_submodule(self._path), name)


class ModelWithRemoteBlocks(_hf.PreTrainedModel):  # type: ignore[misc]
    """A model of transformers whose blocks are on servers."""

    base_model_prefix = ""  # the base model is no module of this one

    def __init__(self, config: Any, blocks: Blocks) -> None:
        super().__init__(config)
        self.blocks = blocks

    def __getattr__(self, name: str) -> Any:
        blocks = self.__dict__.get("blocks")
        if blocks is not None and name == blocks.tables.blocks.partition(".")[0]:
            return _Body(blocks, name)
        if blocks is not None and name == blocks.tables.head.partition(".")[0]:
            return blocks.local.get_submodule(name)
        return super().__getattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Let the local modules, which are no children of this one, follow `to` and `cuda`."""
        moved: Self = super()._apply(fn, recurse)
        self.blocks.move(self.device)
        return moved

    def get_input_embeddings(self) -> nn.Module:
        """Return the embeddings of tokens, loaded from the checkpoint."""
        found: nn.Module = self.blocks.local.get_input_embeddings()
        return found

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, loaded from the checkpoint. It follows the last norm."""
        found: nn.Module = self.blocks.local.get_output_embeddings()
        return found

    def _forward_tuned(
        self,
        ids: Tensor,
        mask: Tensor | None,
        labels: Tensor | None,
        keep: int,
        items: Tensor | int | None,
    ) -> Any:
        """Return the last `keep` logits (0: all) and the loss of the whole input, with gradients.

        `items`: the sum of the losses is divided by it; None: by the number of labels.
        """
        check_training_mask(mask, ids, self.generation_config.pad_token_id)
        logits = self.blocks.forward_tuned(ids, mask)
        loss = None
        if labels is not None:
            if mask is not None:  # no token precedes one behind padding
                labels = labels.masked_fill(mask.roll(1, -1) == 0, -100)
            vocabulary = self.config.get_text_config().vocab_size
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=vocabulary, num_items_in_batch=items
            )
        return _hf.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits[:, -keep:])


def load_local_modules(
    model: str, config: Any, dtype: torch.dtype, options: Mapping[str, Any]
) -> Any:
    """Return the causal language model of transformers without its blocks.

    `model`: a folder, a name on the hub, or an address. `options`: those of transformers' from_pretrained. Raise
    ModelSourceError if the weights cannot be read. A gateway gives none: it would hand them to every client.
    """
    text = copy.deepcopy(config.get_text_config())
    text._attn_implementation = None  # that of the model without blocks; not every family has it
    tables = FAMILIES[text.model_type].tables
    try:
        weights = _read_weights(model, text.num_hidden_layers, tables, options)
    except (ModelSourceError, OSError) as error:  # OSError: of transformers, for a name on the hub
        reason = error.message if isinstance(error, ModelSourceError) else str(error)
        reason = reason.partition("\n")[0].rstrip(".")
        raise ModelSourceError("model", f"{reason}; {_LOCAL_NEED}") from error
    base = _hf.MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    # One block keeps what transformers computes for the first block, such as masks by the type of its attention.
    text.num_hidden_layers = 1
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    made, info = _without_blocks(base, tables, text.model_type in _TUPLES).from_pretrained(
        None, config=text, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"])[:4])
        raise ModelSourceError("model", f"{model} lacks weights for {names}; {_LOCAL_NEED}")
    return made.eval().requires_grad_(False)


def _read_weights(
    model: str, n_blocks: int, tables: Tables, options: Mapping[str, Any]
) -> dict[str, Tensor]:
    folder = _weights_folder(model, n_blocks, tables, options)
    weights: dict[str, Tensor] = {}
    for name, entry in read_tensors(folder, tables.names.__contains__).items():
        with safe_open(folder / entry.file, framework="pt") as file:
            weights[name] = file.get_tensor(entry.stored_name)
    return weights


def _without_blocks(base: Any, tables: Tables, returns_tuple: bool) -> Any:
    def __init__(self: Any, config: Any) -> None:
        base.__init__(self, config)
        blocks = nn.ModuleList([_AllBlocks(returns_tuple=returns_tuple)])
        self.set_submodule(tables.blocks, blocks)

    return type(base.__name__, (base,), {"__init__": __init__, "__module__": base.__module__})


def _weights_folder(model: str, n_blocks: int, tables: Tables, options: Mapping[str, Any]) -> Path:
    """Return a folder with the files of these tensors, which are fetched first if they are on the hub."""
    if model.startswith(HUB_SCHEME):
        resolve(model, (0, 1))
        return resolve(model, (n_blocks - 1, n_blocks)).folder
    if "://" in model or Path(model).is_dir():
        return resolve(model).folder
    fetch = import_module("transformers.utils.hub").cached_file
    index = fetch(model, INDEX_FILE, _raise_exceptions_for_missing_entries=False, **options)
    if index is None:
        return Path(fetch(model, SINGLE_FILE, **options)).parent
    folder = Path(index).parent
    wanted = {
        file for name, file in shard_names(folder).items() if canonical_name(name) in tables.names
    }
    for file in sorted(wanted):
        fetch(model, file, **options)
    return folder
