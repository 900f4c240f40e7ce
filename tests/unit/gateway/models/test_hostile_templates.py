"""Hostile chat templates: check and worker stay within bounds, and only that model's chats fail."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.models.tokenizers import encode_bytes, make_tokenizer, model_files

from modelswarm_gateway.models.chat_prompts import TemplateBudgetError
from modelswarm_gateway.models.chat_template import TemplateError
from modelswarm_gateway.models.model_requests import SMALL_REQUEST_BYTES
from modelswarm_gateway.models.model_worker import MAX_REASON_CHARACTERS
from modelswarm_gateway.models.tokenizer import ModelTokenizer

HI = [{"role": "user", "content": "hi"}]
HUGE = "10000000000"
RANGES = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = {
    "nested ranges": RANGES,
    "power": "{% set x = (7 ** 300000000) % 10 %}{{ x }}",
    "power in an output": "{{ (7 ** 300000000) % 10 }}",
    "repeated text": f"{{{{ ('a' * {HUGE})|length }}}}",
    "repeated list": f"{{% set x = [1] * {HUGE} %}}",
    "repeated by the messages": f"{{{{ 'a' * (messages|length * {HUGE}) }}}}",
    "wide format": "{{ '%2000000000d' % 1 }}",
    "wide format method": "{{ '{:>2000000000}'.format(1) }}",
    "centred text": f"{{{{ 'a'|center({HUGE}) }}}}",
    "autoescape of centred text": f"{{% autoescape 'a'|center({HUGE}) %}}a{{% endautoescape %}}",
    "padded batch": f"{{{{ [1]|batch({HUGE}, 0)|list }}}}",
    "rounding": "{{ 1|round(300000000, 'ceil') }}",
    "recursive macro": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "shared lists": (
        "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}"
        "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}"
    ),
    "lipsum": "{{ lipsum(n=1000000000) }}",
}
CHECK = """
import resource, sys
from modelswarm.checkpoint.chat_template import check_template
resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for line in sys.stdin:
    check_template(line.rstrip().replace("\\\\n", "\\n"))
"""
CHILD_SECONDS = 300.0  # seconds; generous, as the processor time has a lower limit


def impatient(template: str) -> ModelTokenizer:
    """Return a tokenizer whose requests may take half a second of processor time."""
    return ModelTokenizer(model_files(template=template), cpu_seconds=0.5, name="toy")


def test_check_of_bombs_computes_nothing() -> None:
    """A child has 256 MiB and 60 s of processor time for all of them."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        input="\n".join(BOMBS.values()),
        text=True,
        capture_output=True,
        timeout=CHILD_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
async def test_bomb_ends_its_own_request_only(bomb: str) -> None:
    text = impatient(bomb)
    with pytest.raises(
        TemplateError, match=r"took more than|needed more than|cannot render|is und"
    ):
        await text.encode_chat(HI)
    assert await text.encode("hi", special=False) == encode_bytes("hi")


async def test_second_bomb_ends_the_chats_of_its_model_only() -> None:
    hostile, other = impatient(RANGES), make_tokenizer()
    assert hostile.chat_fault == ""
    for _ in range(2):
        with pytest.raises(TemplateBudgetError, match=r"took more than 0\.5 s of processor time"):
            await hostile.encode_chat(HI)
    assert hostile.chat_fault == (
        "tokenizer_config.json: the model's chat template took more than 0.5 s of processor time, "
        "2 times; text completions work"
    )
    with pytest.raises(TemplateError, match="2 times; text completions work"):
        await hostile.encode_chat(HI)
    assert await hostile.encode("hi", special=False) == encode_bytes("hi")
    assert await other.encode_chat(HI)
    assert other.chat_fault == ""


async def test_bombs_for_tools_leave_chats_without_tools() -> None:
    named = [{"name": "default", "template": "yes"}, {"name": "tool_use", "template": RANGES}]
    files = model_files(settings={"chat_template": named})
    text = ModelTokenizer(files, cpu_seconds=0.5, name="toy")
    for _ in range(2):
        with pytest.raises(TemplateBudgetError):
            await text.encode_chat(HI, tools=[{}])
    with pytest.raises(TemplateError, match="2 times; chats without tools work"):
        await text.encode_chat(HI, tools=[{}])
    assert await text.encode_chat(HI) == encode_bytes("yes")
    assert text.chat_fault == ""


async def test_reason_of_a_refusal_is_bounded() -> None:
    """A template may refuse with any text, which would become an error message, and its compiler may quote it."""
    long = make_tokenizer(template="{{ raise_exception('a' * 100000) }}")
    with pytest.raises(TemplateError) as refused:
        await long.encode_chat(HI)
    assert len(str(refused.value)) <= MAX_REASON_CHARACTERS
    broken = make_tokenizer(template="{% " + "a" * 100_000 + " %}")
    assert len(broken.chat_fault) <= MAX_REASON_CHARACTERS + 100


async def test_large_request_does_not_end_the_chats() -> None:
    slow = (
        "{% for m in messages %}{% if m.content|length > 9 %}" + RANGES + "{% endif %}{% endfor %}"
    )
    text = impatient(slow)
    large = [{"role": "user", "content": "x" * SMALL_REQUEST_BYTES * 8}]
    for _ in range(3):
        with pytest.raises(TemplateBudgetError):
            await text.encode_chat(large)
    assert text.chat_fault == ""
    assert await text.encode_chat(HI) == []


def test_template_that_exhausts_its_compiler_refuses_only_chats() -> None:
    deep = "{% if a %}" * 5000 + "{% endif %}" * 5000
    text = impatient(deep)
    assert text.chat_fault.startswith("tokenizer_config.json: the chat template does not compile")


async def test_rendering_keeps_unicode() -> None:
    for content in ("é 🌍 日本", "\x00"):
        text = make_tokenizer(template="{{ messages[0].content }}")
        ids = await text.encode_chat([{"role": "user", "content": content}])
        assert text.decode(ids) == content
