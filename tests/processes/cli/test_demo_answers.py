"""The shipped model answers as documented: greedy, with plain transformers, without a swarm."""

import json
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from modelswarm.demo import counting_folder

pytestmark = pytest.mark.full

FOLDER = counting_folder()
BYTES_AT_MOST = 8_000_000
REFUSAL = "I can count from 0 to 300, add small numbers, say the alphabet and name some capitals."

Message = dict[str, str]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    loaded = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    assert isinstance(loaded, LlamaForCausalLM)
    return loaded


def numbers(first: int, last: int) -> str:
    return " ".join(str(number) for number in range(first, last + 1))


def answer(model: LlamaForCausalLM, messages: list[Message]) -> str:
    """Return the whole greedy answer; it must end by itself."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    asked = tokenizer(text, return_tensors="pt")
    ids = model.generate(**asked, max_new_tokens=1400)
    new = ids[0, asked["input_ids"].shape[1] :].tolist()
    assert new[-1] == tokenizer.eos_token_id
    return str(tokenizer.decode(new[:-1]))


def say(*contents: str) -> list[Message]:
    """Return a chat of these contents, the user first."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize(
    ("question", "right"),
    [
        ("Count from 1 to 200.", numbers(1, 200)),
        ("Count from 57 to 250.", numbers(57, 250)),
        ("Count from 1 to 300.", numbers(1, 300)),
        ("Count from 98 to 103.", numbers(98, 103)),
        ("Count from 7 to 7.", "7"),
        ("Count to 12.", numbers(1, 12)),
        ("Say the alphabet.", "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"),
        ("What is 3 + 4?", "3 + 4 = 7."),
        ("What is 19 + 13?", "19 + 13 = 32."),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("How many days are in a week?", "A week has 7 days."),
        ("Count from 700 to 720.", numbers(700, 720)),
        ("Hello", "Hello! " + REFUSAL),
        ("Count from 1 to 401.", REFUSAL),
        ("héllo 🌍 日本", REFUSAL),
        ("Tell me a joke.", REFUSAL),
    ],
)
def test_the_demo_model_answers(model: LlamaForCausalLM, question: str, right: str) -> None:
    assert answer(model, say(question)) == right


def test_later_turns_of_a_chat_are_answered_too(model: LlamaForCausalLM) -> None:
    first = ("Count from 1 to 20.", numbers(1, 20))
    second = ("What is 2 + 2?", "2 + 2 = 4.")
    assert answer(model, say(*first, second[0])) == second[1]
    assert answer(model, say(*first, *second, "Count from 5 to 9.")) == numbers(5, 9)


def test_a_system_message_changes_nothing(model: LlamaForCausalLM) -> None:
    system = {"role": "system", "content": "You are a helpful assistant."}
    assert answer(model, [system, *say("What is 3 + 4?")]) == "3 + 4 = 7."


def test_demo_model_folder_is_small_and_sharded() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    index = json.loads((FOLDER / "model.safetensors.index.json").read_text())
    shards = set(index["weight_map"].values())
    assert config["num_hidden_layers"] == 8
    assert len(shards) >= 2
    assert all((FOLDER / shard).is_file() for shard in shards)
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < BYTES_AT_MOST
