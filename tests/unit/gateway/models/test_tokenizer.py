"""Model files in the gateway: chat templates in their sandbox, tokens, and sampling defaults."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime
from typing import Any

import pytest
from support.models.tokenizers import (
    BEGIN,
    BYTES_FROM,
    END,
    SPECIALS,
    encode_bytes,
    make_tokenizer,
    model_files,
)

from modelswarm.checkpoint.chat_template import TOOL_TEMPLATE_FILE
from modelswarm.checkpoint.tokenizer import MAX_TOKENIZER_COMMAS
from modelswarm_gateway.generation.tool_calls.families import find_format
from modelswarm_gateway.models.chat_template import (
    ChatTemplate,
    TemplateError,
    template_variables,
)
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.models.tokenizer import EncodeError, ModelFilesError

HI = [{"role": "user", "content": "hi"}]


def render_template(source: str, **extra: Any) -> str:
    return ChatTemplate(source).render(template_variables(HI, extra, {"bos_token": "<s>"}))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
        (
            "{% for m in messages %}\n  {% if loop.first %}\n[{{ m['role'] }}]{% endif %}\n{% endfor %}",
            "[user]",
        ),
        ("{{ messages | tojson }}", '[{"role": "user", "content": "hi"}]'),
        ("{{ 'é<b>' | tojson }}", '"é<b>"'),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% if tools is none and add_generation_prompt %}yes{% endif %}", "yes"),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_template_gets_the_helpers_of_hugging_face(source: str, text: str) -> None:
    assert render_template(source, enable_thinking=False) == text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}x{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ lipsum.__globals__['os'].system('id') }}",
        "{{ strftime_now.__globals__ }}{{ strftime_now.__globals__['json'] }}",
        "{{ '%s'.format.__self__.__class__.mro() }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% include 'x' %}",
    ],
)
def test_unsafe_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateError):
        render_template(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content.x }}", "cannot render"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "cannot render"),
        ("{% for %}", "does not compile"),
    ],
)
def test_failing_template_reports_its_reason(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        render_template(source)


def test_template_variables_cannot_replace_messages_or_bos() -> None:
    assert (
        render_template("{{ messages | length }}{{ bos_token }}", messages=[], bos_token="x")
        == "1<s>"
    )


async def test_chat_is_rendered_with_a_single_bos() -> None:
    text = make_tokenizer()
    ids = await text.encode_chat(HI)
    assert ids == [BEGIN, 3, *encode_bytes("hi"), END, 4]


async def test_chat_template_file_overrides_the_config() -> None:
    files = model_files() | {"chat_template.jinja": b"{{ messages[0].content }}"}
    assert await make_tokenizer(files).encode_chat(HI) == encode_bytes("hi")


async def test_named_templates_use_the_default_one() -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    text = make_tokenizer(settings={"chat_template": named})
    assert await text.encode_chat(HI) == encode_bytes("yes")


async def test_requests_with_tools_take_the_template_for_tools() -> None:
    """As those of Hermes 3, whose default template shows no tools."""
    named = [{"name": "tool_use", "template": "{{ tools }}<tool_call>"}]
    named.append({"name": "default", "template": "yes"})
    text = make_tokenizer(settings={"chat_template": named})
    assert await text.encode_chat(HI, tools=[{}]) == encode_bytes("[{}]<tool_call>")
    assert await text.encode_chat(HI) == encode_bytes("yes")
    assert find_format(text.chat_template(has_tools=True)).family_name == "hermes"
    assert find_format(text.chat_template(has_tools=False)).family_name == ""
    replaced = model_files(settings={"chat_template": named}) | {"chat_template.jinja": b"own"}
    assert await make_tokenizer(replaced).encode_chat(HI, tools=[{}]) == encode_bytes("own")


async def test_template_for_tools_may_have_its_own_file() -> None:
    """As transformers has saved several templates since 4.51."""
    files = model_files(template="yes") | {TOOL_TEMPLATE_FILE: b"{{ tools }}<tool_call>"}
    text = make_tokenizer(files)
    assert await text.encode_chat(HI, tools=[{}]) == encode_bytes("[{}]<tool_call>")
    assert await text.encode_chat(HI) == encode_bytes("yes")


async def test_text_with_a_token_that_has_no_embedding_is_refused() -> None:
    [last] = encode_bytes("z")
    text = make_tokenizer(config={"vocab_size": last})
    assert await text.encode("a", special=False) == encode_bytes("a")
    with pytest.raises(EncodeError, match=f"no embedding for its token z: {last}, allowed up to"):
        await text.encode("az", special=False)


def test_grammar_cannot_name_a_token_that_has_no_embedding() -> None:
    """The check of the grammar refuses it, as any other name that is no token."""
    last = len(SPECIALS) - 1
    name = SPECIALS[last]
    for size, found in ((last + 1, {name: last}), (last, {})):
        text = make_tokenizer(config={"vocab_size": size})
        assert text.tokens_within(f'start: "a" {name}') == found


async def test_model_without_template_completes_but_cannot_chat() -> None:
    text = make_tokenizer(template=None)
    assert text.chat_fault
    assert await text.encode("hi", special=True) == encode_bytes("hi")
    with pytest.raises(TemplateError, match="no chat template"):
        await text.encode_chat(HI)


@pytest.mark.full
async def test_long_text_is_tokenized_without_blocking_the_loop() -> None:
    """The share of CPU time of this process, which is independent of other load."""
    text, longest = make_tokenizer(), 0.0
    began = last = time.process_time()
    work = asyncio.create_task(text.encode("word " * 100_000, special=True))
    while not work.done():
        await asyncio.sleep(0.001)
        longest, last = max(longest, time.process_time() - last), time.process_time()
    assert len(work.result()) == 500_000
    assert longest < (last - began) / 2


def test_missing_or_invalid_model_file_is_refused() -> None:
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        make_tokenizer({})
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        make_tokenizer({"tokenizer.json": b"{}"})
    with pytest.raises(ModelFilesError, match=r"generation_config\.json: not valid JSON"):
        make_tokenizer(model_files() | {"generation_config.json": b"{"})


async def test_template_that_does_not_compile_refuses_only_chats() -> None:
    text = make_tokenizer(template="{% if %}")
    assert text.chat_fault
    assert await text.encode("hello", special=False)
    with pytest.raises(TemplateError, match=r"does not compile: .*; text completions work"):
        await text.encode_chat([{"role": "user", "content": "hello"}])


def test_eos_comes_from_generation_config_and_tokenizer() -> None:
    assert make_tokenizer().defaults.eos == (END,)
    assert make_tokenizer(generation={"eos_token_id": [7, 9]}).defaults.eos == (
        7,
        9,
        END,
    )
    assert make_tokenizer(generation={}).defaults.eos == (END,)
    no_eos = {"eos_token": None}
    config = {"eos_token_id": 8}
    text = make_tokenizer(generation={}, settings=no_eos, config=config)
    assert text.defaults.eos == (8,)
    nested = {"eos_token_id": None, "text_config": {"eos_token_id": [1, 106]}}
    text = make_tokenizer(generation={}, settings=no_eos, config=nested)
    assert text.defaults.eos == (1, 106)


SAMPLES = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20}


@pytest.mark.parametrize(
    ("generation", "options", "expected"),
    [
        ({}, SamplingOptions(), (0.0, 1.0, 0)),
        ({"temperature": 0.6}, SamplingOptions(), (0.0, 1.0, 0)),
        ({"do_sample": False, "temperature": 0.6}, SamplingOptions(), (0.0, 1.0, 0)),
        ({"do_sample": True}, SamplingOptions(), (1.0, 1.0, 0)),
        (SAMPLES, SamplingOptions(), (0.6, 0.9, 20)),
        (SAMPLES, SamplingOptions(temperature=0.0), (0.0, 0.9, 20)),
        (SAMPLES, SamplingOptions(top_k=-1, top_p=1.0), (0.6, 1.0, 0)),
        (SAMPLES, SamplingOptions(top_k=0), (0.6, 0.9, 0)),
        ({}, SamplingOptions(temperature=1.5, top_k=3, top_p=0.5), (1.5, 0.5, 3)),
    ],
)
def test_request_options_override_the_models_defaults(
    generation: dict[str, Any], options: SamplingOptions, expected: tuple[float, float, int]
) -> None:
    sampling = make_tokenizer(generation=generation).defaults.sampling(options, 5)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected


def test_repetition_penalty_applies_to_greedy_and_seeds_wrap() -> None:
    defaults = make_tokenizer(generation={"repetition_penalty": 1.2}).defaults
    assert defaults.sampling(SamplingOptions(), 5).repetition_penalty == 1.2
    assert defaults.sampling(SamplingOptions(), 5).seed == 5
    assert defaults.sampling(SamplingOptions(seed=-1), 5).seed == 2**64 - 1
    assert defaults.sampling(SamplingOptions(ignore_eos=True), 5).eos == ()


def test_vocabulary_size_comes_from_the_model_config() -> None:
    assert make_tokenizer().vocabulary == BYTES_FROM + 256
    nested = {"vocab_size": None, "text_config": {"vocab_size": 1000}}
    assert make_tokenizer(config=nested).vocabulary == 1000
    unstated: dict[str, Any] = {"vocab_size": None, "model_type": "gemma3", "text_config": {}}
    assert make_tokenizer(config=unstated).vocabulary == 262_208
    assert make_tokenizer(config={**unstated, "model_type": "none"}).vocabulary == BYTES_FROM + 256


async def test_older_file_of_special_tokens_counts_as_in_transformers() -> None:
    older = {"special_tokens_map.json": json.dumps({"bos_token": "<|user|>"}).encode()}
    ids_known: dict[str, Any] = {"added_tokens_decoder": {}}
    for settings, expected in (({}, "<|user|>"), (ids_known, "<|begin|>")):
        files = model_files(template="{{ bos_token }}", settings=settings) | older
        ids = await make_tokenizer(files).encode_chat(HI)
        assert ids == [SPECIALS.index(expected)]


def test_tokenizer_of_too_many_entries_is_refused_unbuilt() -> None:
    """In 64 MiB of JSON there is room for four million tokens, which need more than a gigabyte."""
    files = model_files() | {"tokenizer.json": b"[" + b"1," * (MAX_TOKENIZER_COMMAS + 1)}
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json: 2097153 commas"):
        make_tokenizer(files)
