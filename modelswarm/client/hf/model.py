"""A transformers model without blocks: `generate` prepares its arguments as ever, and servers compute the tokens.

transformers merges the configurations, checks lengths and masks, and builds processors and criteria. Then it calls
`_sample`, which here asks the gateway for sampled tokens instead of logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria

from modelswarm.client.hf.arguments import (
    check_arguments,
    check_forward,
    check_tuned_forward,
    needs_logits,
    returns_scores,
)
from modelswarm.client.hf.blocks import Blocks, ModelWithRemoteBlocks
from modelswarm.client.hf.decoding import NotedEnds, bound_candidates, decode_rows, turn_streamer
from modelswarm.client.hf.errors import ArgumentError, UnsupportedArgumentError
from modelswarm.client.hf.inputs import (
    Rows,
    check_context,
    check_forward_mask,
    check_ids,
    check_labels,
    check_length,
    check_mask,
    check_padding,
    end_tokens,
    infer_mask,
    kept_logits,
    pad_rows,
    split_rows,
)
from modelswarm.client.hf.remote_cache import CACHE_NAME, RemoteCache, take_cache
from modelswarm.client.hf.rows import AnswerRow, SessionRow, TokenRow, start_answers
from modelswarm.client.hf.sampling import ModelFacts, ServerSampling, plan_sampling, seeded
from modelswarm.client.hf.session import InputRule, ModelSession
from modelswarm.client.hf.values import check_config, check_values, named_errors
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.client.sessions.errors import SessionLengthError
from modelswarm.client.sessions.session import GatewaySession
from modelswarm.client.training.prompts import SoftPrompts
from modelswarm.protocol.wire import api_pb2


@dataclass(slots=True)
class Turn:
    """One call of `generate`."""

    shown: Tensor | None  # the input as it was given; None: none was
    contexts: Rows | None  # whole context of each row of a session
    session: ModelSession | None
    needs_logits: bool = False
    cache: RemoteCache | None = None
    sessions: list[GatewaySession] = field(default_factory=list)  # opened for this call alone
    ends: dict[int, int] = field(default_factory=dict)  # generated tokens of a row that has ended
    is_running: bool = False  # the servers were asked, or a loop of the caller runs

    def has_begun(self) -> bool:
        return self.is_running or (self.cache is not None and self.cache.is_used)


Sampler: TypeAlias = Literal["servers", "client"]
# Its methods are typed for models of its own, by a second `self`.
_hf: Any = import_module("transformers")


class DistributedModelForCausalLM(ModelWithRemoteBlocks, _hf.GenerationMixin):  # type: ignore[misc]
    """A causal language model whose blocks, embeddings and head are on the servers of a swarm."""

    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self,
        config: Any,
        generation_config: GenerationConfig,
        connection: Connection,
        served: ServedModel,
        blocks: Blocks,
        sampling: Sampler = "servers",
        prompts: SoftPrompts | None = None,
    ) -> None:
        """`sampling`: see `from_pretrained`. `prompts`: those that are trained, if any are."""
        super().__init__(config, blocks)
        self.prompts = blocks.prompts = prompts
        before = 0 if prompts is None else prompts.rows
        # Positions that the swarm has for a request; 0: not known.
        self.context = max(0, served.context - before)
        self.sampling = sampling
        self.generation_config = generation_config
        self.served_name = served.name
        self.connection = connection
        # transformers asks the parameters for the model's device and dtype.
        self.placeholder = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
        words = generation_config.bad_words_ids or []
        suppressed = [[token] for token in generation_config.suppress_tokens or []]
        forbidden = frozenset(tuple(word) for word in [*words, *suppressed])
        self._facts = ModelFacts(config.get_text_config().vocab_size, forbidden)
        self._active: ContextVar[ModelSession | None] = ContextVar("session", default=None)
        self._call: ContextVar[Turn | None] = ContextVar("turn", default=None)

    # ---- sessions

    def inference_session(
        self,
        *,
        max_length: int,
        inputs: InputRule = "auto",
        batch_size: int = 1,
        ttl: int | None = None,
    ) -> ModelSession:
        """Open a session of `max_length` positions, prompts and answers together; use it by `with`.

        Inside of the block `generate` continues it, with or without `session=`. See `ModelSession` for `inputs`.
        `ttl`: seconds that it is kept without a turn. Raise NoCapacityError if the servers have no room.
        """
        prefix = self.blocks.prefix()
        check_length(max_length, self.context)

        def open_row() -> GatewaySession:
            return GatewaySession(
                self.connection, self.served_name, max_length, ttl=ttl, prefix=prefix
            )

        return ModelSession(open_row, max_length, inputs, self.use_session, batch_size)

    @property
    def active_session(self) -> ModelSession | None:
        """The session whose `with` block runs in this thread."""
        return self._active.get()

    @contextmanager
    def use_session(self, session: ModelSession | None) -> Iterator[ModelSession | None]:
        """Let `generate` continue `session` inside of the block; None: no session."""
        token = self._active.set(session)
        try:
            yield session
        finally:
            with suppress(ValueError):  # a generator may end in another context than it began in
                self._active.reset(token)

    # ---- generate

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        *,
        session: Any = None,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Generate as transformers does; see docs/reference/from-petals.md for what servers do and what is refused.

        `inputs`: int ids [batch, length], padded on the left with an `attention_mask`. Returns ids [batch, length +
        generated]. In a session the input is that of this turn. Without an input the answer goes on behind the log, and
        only generated tokens are returned.
        """
        session = self.active_session if session is None else session
        if session is not None and not isinstance(session, ModelSession):
            detail = "allowed: one of model.inference_session(max_length=...)"
            raise ArgumentError("session", f"a {type(session).__name__}; {detail}")
        check_config(generation_config)
        own = {} if generation_config is None else generation_config.to_dict()
        asked, defaults = own | kwargs, self.generation_config.to_dict()
        check_values({**asked, "streamer": streamer}, defaults, self._facts.vocabulary)
        check_arguments(asked, defaults, in_session=session is not None)
        if inputs is not None and kwargs.get("input_ids") is not None:
            raise ArgumentError("input_ids", "given twice; pass it once")
        given = kwargs.pop("input_ids", None)
        ids = inputs if inputs is not None else given
        mask = kwargs.pop("attention_mask", None)
        if ids is not None:
            ids = check_ids(ids, self._facts.vocabulary)
        elif mask is not None:
            raise ArgumentError("attention_mask", "given without input_ids; leave it out")
        turn = Turn(ids, None, session, needs_logits(asked))
        turn.is_running = asked.get("custom_generate") is not None
        if streamer is not None:
            kwargs["streamer"] = (
                streamer if session is None else turn_streamer(streamer, lambda: turn.shown)
            )
        with named_errors(asked, turn.has_begun):
            if ids is not None:
                mask = self._find_mask(mask, ids, generation_config, kwargs)
            if session is None:
                return self._run(turn, ids, mask, generation_config, kwargs)
            with session.turn():
                return self._continue(turn, session, mask, generation_config, kwargs)

    def _find_mask(
        self,
        mask: Any,
        ids: Tensor,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
    ) -> Any:
        if mask is not None:
            check_mask(mask, ids)
            return mask
        merged, _ = self._prepare_generation_config(generation_config, **kwargs)
        pad, ends = merged.pad_token_id, end_tokens(merged)
        check_padding(ids, pad, ends)
        return infer_mask(ids, pad, ends)

    def _continue(
        self,
        turn: Turn,
        session: ModelSession,
        mask: Tensor | None,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a turn of the session. transformers sees each row's whole context, as in Petals."""
        merged, _ = self._prepare_generation_config(generation_config, **kwargs)
        if turn.shown is None and not session.position:
            if merged.bos_token_id is None:
                detail = "the session is empty, and the model has no bos_token_id to begin with"
                raise ArgumentError("input_ids", f"{detail}; pass input_ids")
            turn.shown = torch.tensor([[merged.bos_token_id]])
        ids = turn.shown
        turn.contexts = session.contexts(None if ids is None else split_rows(ids, mask))
        pad = 0 if merged.pad_token_id is None else merged.pad_token_id
        device = torch.device("cpu") if ids is None else ids.device
        whole, whole_mask = pad_rows(turn.contexts, pad, device)
        if whole_mask is None:
            whole_mask = torch.ones_like(whole)  # no token of the context is padding
        result = self._run(turn, whole, whole_mask, generation_config, kwargs)
        is_plain = isinstance(result, Tensor)
        sequences = (result if is_plain else result.sequences)[:, whole.shape[1] :]
        if turn.cache is not None and turn.cache.is_used:
            self._finish_turn(turn, session, sequences, end_tokens(merged))
        if ids is not None:
            sequences = torch.cat([ids, sequences], dim=1)
        if is_plain:
            return sequences
        result.sequences = sequences
        return result

    def _run(
        self,
        turn: Turn,
        ids: Tensor | None,
        mask: Tensor | None,
        generation_config: GenerationConfig | None,
        kwargs: dict[str, Any],
    ) -> Any:
        token = self._call.set(turn)
        try:
            # Servers keep the KV, and RemoteCache takes new positions only, whatever the model's defaults say.
            given = {**kwargs, "attention_mask": mask, "use_cache": True}
            result = super().generate(ids, generation_config, **given)
        finally:
            self._call.reset(token)
            if turn.cache is not None:
                turn.cache.close()
            for one in turn.sessions:
                one.close()
        if not isinstance(result, Tensor):
            setattr(result, CACHE_NAME, None)  # its sessions are closed
        return result

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Let the servers sample, if they can. Called by transformers with everything prepared."""
        turn = self._call.get()
        assert turn is not None
        eos = [
            token
            for criterion in stopping_criteria
            if type(criterion) is EosTokenCriteria
            for token in criterion.eos_token_id.tolist()
        ]
        samples, length = bool(generation_config.do_sample), input_ids.shape[1]
        plan = plan_sampling(
            logits_processor, self._facts, do_sample=samples, length=length, eos=eos
        )
        contexts = turn.contexts or split_rows(input_ids, model_kwargs.get("attention_mask"))
        draws_here = samples and self.sampling == "client"
        draws_here = draws_here or returns_scores(generation_config)
        if plan.reasons or turn.needs_logits or draws_here:
            return super()._sample(
                input_ids,
                logits_processor,
                NotedEnds(stopping_criteria, turn.ends, length),
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
        turn.is_running = True
        most = max(length + 1, stopping_criteria.max_length)  # a caller's criterion replaces ours
        max_new = most - length
        can_end = any(
            type(each) not in (EosTokenCriteria, MaxLengthCriteria) for each in stopping_criteria
        )
        if turn.session is not None:
            rows = self._start_turn(turn, contexts, max_new, plan, can_end)
        elif self.prompts is not None:
            rows = self._start_tuned(turn, contexts, max_new, plan, can_end)
        else:
            rows = [*self._start_answers(contexts, max_new, plan)]
        pad = generation_config._pad_token_tensor
        ids = decode_rows(
            rows,
            input_ids,
            stopping_criteria,
            most,
            0 if pad is None else int(pad),
            streamer,
        )
        if generation_config.return_dict_in_generate:
            return _hf.generation.GenerateDecoderOnlyOutput(sequences=ids)
        return ids

    def _finish_turn(
        self, turn: Turn, session: ModelSession, generated: Tensor, eos: list[int]
    ) -> None:
        """Bring the session's rows to the result of a turn whose tokens were chosen here."""
        assert turn.contexts is not None
        has_input = turn.shown is not None
        for place, (context, row) in enumerate(zip(turn.contexts, generated.tolist(), strict=True)):
            end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
            end = min(end, turn.ends.get(place, end))
            session.finish_turn(place, len(context), context + row[:end], has_input=has_input)

    def _start_answers(self, contexts: Rows, max_new: int, plan: ServerSampling) -> list[AnswerRow]:
        requests = [
            api_pb2.GenerateRequest(
                model=self.served_name,
                tokens=api_pb2.TokenIds(ids=context),
                max_tokens=max_new,
                sampling=sampling,
                ignore_eos=True,  # those of generation_config are in stop_token_ids
            )
            for context, sampling in zip(contexts, seeded(plan, len(contexts)), strict=True)
        ]
        return start_answers(self.connection, requests)

    def _start_turn(
        self, turn: Turn, contexts: Rows, max_new: int, plan: ServerSampling, can_end: bool
    ) -> list[TokenRow]:
        session = turn.session
        assert session is not None
        rows: list[TokenRow] = []
        samplings = seeded(plan, len(contexts))
        for place, (context, sampling) in enumerate(zip(contexts, samplings, strict=True)):
            new = session.begin_turn(place, context, has_input=turn.shown is not None)
            one = session.rows[place]
            rows.append(SessionRow(one, new, max_new, sampling, can_end=can_end))
        return rows

    def _start_tuned(
        self, turn: Turn, contexts: Rows, max_new: int, plan: ServerSampling, can_end: bool
    ) -> list[TokenRow]:
        """Start each row in a session of its own, behind the soft prompt. All of them need room at once."""
        prefix, rows = self.blocks.prefix(), list[TokenRow]()
        for context, sampling in zip(contexts, seeded(plan, len(contexts)), strict=True):
            length = len(context) + max_new
            one = GatewaySession(self.connection, self.served_name, length, prefix=prefix)
            turn.sessions.append(one)
            rows.append(SessionRow(one, context, max_new, sampling, can_end=can_end))
        return rows

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *_: Any
    ) -> None:
        """Give the loops of transformers a cache of sessions, which are opened when logits are needed."""
        turn = self._call.get()
        assert turn is not None
        length = generation_config.max_length
        assert length is not None
        limit, place = self.context, "the context of the swarm"
        if turn.session is not None:
            limit, place = turn.session.max_length, "the session"
        if limit and length > limit:
            detail = f"the input and what shall be generated are {length} positions, and {place} has {limit}"
            raise SessionLengthError("max_length", f"maximum length exceeded: {detail}")
        turn.cache = self._make_cache(length, turn.session)
        model_kwargs[CACHE_NAME] = turn.cache

    def _get_candidate_generator(self, generation_config: GenerationConfig, **prepared: Any) -> Any:
        made = super()._get_candidate_generator(generation_config, **prepared)
        return bound_candidates(made, generation_config.max_length)

    def _make_cache(self, max_length: int, session: ModelSession | None = None) -> RemoteCache:
        prefix = self.blocks.prefix()

        def open_session() -> GatewaySession:
            return GatewaySession(self.connection, self.served_name, max_length, prefix=prefix)

        fixed = None if session is None else session.rows
        return RemoteCache(open_session, self._facts.vocabulary, fixed)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: RemoteCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        output_hidden_states: bool | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cache: RemoteCache | None = None,
        **options: Any,
    ) -> Any:
        """Return the logits [batch, length, vocabulary] in float32; those of padding are zeros.

        `attention_mask` [batch, all positions so far]. `logits_to_keep`: only those of the last positions; 0: of all.
        With `use_cache` the result has a cache for the next call; it holds sessions until its `close`.
        Its name is `past_key_values`, and since transformers 5.24 `cache`.
        `output_hidden_states`: also those before each block and after the norm. Each block is a call, so it is slower.

        With soft prompts, or with `labels` [batch, length], the modules beside the blocks run here, and gradients flow.
        Labels give the loss of transformers; -100 leaves a position out. Then padding may be on both sides.
        `num_items_in_batch`: the sum of the losses is divided by it, as transformers' Trainer wants it when it
        accumulates gradients; None: by the number of labels.
        """
        if labels is None:
            options["num_items_in_batch"] = num_items_in_batch
        check_forward(options)
        ids = check_ids(input_ids, self._facts.vocabulary)
        logits_to_keep = kept_logits(logits_to_keep, ids.shape[1])
        given = take_cache(past_key_values, cache, ids)
        check_values({"use_cache": use_cache}, {}, self._facts.vocabulary)
        is_cached = use_cache or given is not None
        if labels is not None or (self.prompts is not None and not is_cached):
            unused = {
                "past_key_values": given,
                "use_cache": use_cache,
                "output_hidden_states": output_hidden_states,
            }
            check_tuned_forward(unused)
            check_labels(labels, ids, self._facts.vocabulary)
            return self._forward_tuned(
                ids, attention_mask, labels, logits_to_keep, num_items_in_batch
            )
        if output_hidden_states:
            return self._forward_blocks(ids, attention_mask, given, use_cache, logits_to_keep)
        cache = given
        before = 0 if cache is None else cache.get_seq_length()
        check_forward_mask(attention_mask, ids, self.generation_config.pad_token_id, before)
        if cache is None:
            check_context(ids.shape[1], self.context)
            limit = self.context or self.config.max_position_embeddings
            cache = self._make_cache(limit if use_cache else ids.shape[1])
        mask = None if attention_mask is None else attention_mask[:, before:]
        logits = cache.forward(ids, mask, logits_to_keep)
        if given is None and not use_cache:
            cache.close()
            cache = None
        return _hf.modeling_outputs.CausalLMOutputWithPast(logits=logits, **{CACHE_NAME: cache})

    def _forward_blocks(
        self, ids: Tensor, mask: Tensor | None, cache: Any, use_cache: bool | None, keep: int
    ) -> Any:
        """Return logits and hidden states, block by block."""
        for name, value in (("past_key_values", cache), ("use_cache", use_cache)):
            if value:
                detail = "with output_hidden_states the whole input is run; leave it out"
                raise UnsupportedArgumentError(name, detail)
        check_forward_mask(mask, ids, self.generation_config.pad_token_id)
        if mask is not None:
            check_mask(mask, ids)
        logits, states = self.blocks.forward(ids, mask)
        if mask is not None:
            logits = logits * mask[..., None]
        return _hf.modeling_outputs.CausalLMOutputWithPast(
            logits=logits[:, -keep:], hidden_states=states
        )
