"""The memory of a server: its parts add up, grow with their inputs, and a limit that is too small is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from modelswarm.checkpoint.facts import ModelConfig, ModelFacts
from modelswarm.errors import UserError
from modelswarm.placement.memory import (
    CONTEXT_BYTES,
    DEVICE_PROCESS_BYTES,
    GRAMMAR_BYTES,
    GRAMMAR_BYTES_PER_TOKEN,
    LOGIT_ROWS,
    MARGIN_BYTES,
    MARGIN_PARTS,
    PREFILL_ROWS,
    PROCESS_BYTES,
    SAMPLE_BYTES_PER_LOGIT,
    MemoryModel,
    device_memory,
    host_memory,
    sample_rows,
    server_memory,
)
from modelswarm.placement.plan import MIN_PAGES, PAGE_SIZE, SwarmPlan, full_sessions, plan_swarm
from modelswarm.placement.quantity import bytes_of, human_bytes, limit_at_least, quantity_of
from modelswarm.placement.spans import Span
from modelswarm.resources.spec import ModelSwarm
from modelswarm_serving.core.scheduler import MIN_PREFILL_ROWS

FACTS = ModelFacts(
    config=ModelConfig("llama", n_blocks=8, hidden=64, vocab=320, context=512, tied=False),
    dtype="float32",
    block_elements=10_000,
    embedding_elements=64 * 320,
    kv_elements=64,
)
WHOLE, HEAD = Span(0, 8), Span(0, 4)
GPU = {"nvidia.com/gpu": 1, "memory": "48Gi"}


def make_memory(facts: ModelFacts = FACTS, span: Span = WHOLE, **more: Any) -> MemoryModel:
    given = {"dtype": "float32", "page_size": PAGE_SIZE, "max_length": 512, **more}
    return server_memory(facts, span, **given)


def plan(
    limits: dict[str, Any] | None = None,
    node_memory: dict[str, int] | None = None,
    facts: ModelFacts = FACTS,
    **spec: Any,
) -> SwarmPlan:
    pools = [] if limits is None else [{"name": "a", "resources": {"limits": limits}}]
    document = {
        "apiVersion": "modelswarm.io/v1alpha1",
        "kind": "ModelSwarm",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"source": "file:///tiny"},
            "spans": {"count": 1},
            "pools": pools,
            **spec,
        },
    }
    swarm = ModelSwarm.parse(document)
    return plan_swarm(swarm, facts, "file:///tiny", node_memory=node_memory)


def test_parts_of_server_memory_add_up_to_its_total() -> None:
    memory = make_memory().with_pages(100)
    variable = memory.weights + memory.activations + memory.grammars + memory.retained
    variable += memory.kv

    assert memory.total == sum(size for _, size in memory.parts)
    assert memory.process == PROCESS_BYTES
    assert memory.weights == FACTS.weight_bytes(0, 8, "float32")
    assert memory.kv == 100 * PAGE_SIZE * 8 * FACTS.kv_bytes("float32")
    assert memory.margin == MARGIN_BYTES + -(-variable // MARGIN_PARTS)
    assert all(size > 0 for _, size in memory.parts)


def test_server_memory_names_every_part_with_its_size() -> None:
    text = str(make_memory().with_pages(100))

    names = ("process", "weights", "activations", "grammars", "retained rows", "margin", "KV")
    assert [part.rsplit(" ", 2)[0] for part in text.split(", ")] == list(names)
    assert text.startswith("process 768 MiB, ")


def test_measured_process_counts_only_if_it_is_larger() -> None:
    assert make_memory(process=PROCESS_BYTES + 5).process == PROCESS_BYTES + 5
    assert make_memory(process=5).process == PROCESS_BYTES


def test_replay_log_of_given_size_does_not_grow_with_pages() -> None:
    memory = make_memory(replay_memory=1 << 20)
    assert memory.with_pages(1).retained == memory.with_pages(1000).retained == 1 << 20
    assert make_memory().with_pages(2).retained == 2 * make_memory().with_pages(1).retained


@pytest.mark.parametrize(
    "larger",
    [
        make_memory(token_budget=1024),
        make_memory(max_length=4096),
        make_memory(replace(FACTS, block_elements=20_000)),
        make_memory(replace(FACTS, config=replace(FACTS.config, vocab=3200))),
        make_memory(replace(FACTS, config=replace(FACTS.config, family="gemma2"))),
    ],
)
def test_activations_grow_with_step_and_model(larger: MemoryModel) -> None:
    assert larger.activations > make_memory().activations


def test_activations_of_the_tail_count_its_sampler() -> None:
    wide = replace(FACTS, config=replace(FACTS.config, vocab=100_000))
    assert make_memory(wide).activations > make_memory(wide, HEAD).activations


def test_activations_count_a_turned_head_while_loading() -> None:
    wide = replace(FACTS, embedding_elements=100_000_000)
    assert make_memory(wide).activations == 400_000_000
    assert make_memory(wide, HEAD).activations < 400_000_000


def test_grammars_are_counted_at_the_tail_per_token() -> None:
    wide = replace(FACTS, config=replace(FACTS.config, vocab=FACTS.config.vocab + 1))
    assert make_memory(span=HEAD).grammars == 0
    assert make_memory(wide).grammars - make_memory().grammars == GRAMMAR_BYTES_PER_TOKEN
    assert make_memory().needed(1) - replace(make_memory(), grammars=0).needed(1) > GRAMMAR_BYTES


def test_prefill_rows_of_the_plan_are_the_schedulers() -> None:
    assert PREFILL_ROWS == MIN_PREFILL_ROWS


def test_most_pages_fill_the_limit_to_the_last_page() -> None:
    memory = make_memory()
    for limit in range(PROCESS_BYTES, PROCESS_BYTES + (600 << 20), 7_654_321):
        pages = memory.most_pages(limit)
        assert pages == 0 or memory.needed(pages) <= limit
        assert memory.needed(pages + 1) > limit


def test_pages_never_shrink_as_the_limit_grows() -> None:
    limits = [f"{size}Mi" for size in range(860, 4097, 53)]
    pages = [plan({"memory": limit}).servers[0].pages for limit in limits]

    assert pages == sorted(pages)
    assert pages[-1] > pages[0]
    for limit, planned in zip(limits, (plan({"memory": each}) for each in limits), strict=True):
        assert planned.servers[0].memory.total <= bytes_of(limit, "memory")


def test_limit_between_two_pages_of_memory_is_rounded_down() -> None:
    """The kernel rounds the same way, so a server finds the limit of its plan."""
    for size in range(1 << 30, (1 << 30) + (3 << 20), 12_345):
        assert plan({"memory": size}).servers[0].memory.total <= size // 65536 * 65536


def test_limit_below_the_minimum_names_the_smallest_that_works() -> None:
    with pytest.raises(UserError) as refused:
        plan({"memory": "700Mi"})
    found = re.search(r"but has 700 MiB; allowed: at least (\d+Mi)", refused.value.message)

    assert refused.value.field == "spec.pools[].resources.limits.memory"
    assert "process 768 MiB" in refused.value.message and found is not None
    assert "more spans" not in refused.value.message  # the process alone is larger
    least = bytes_of(found[1], "memory")
    assert plan({"memory": least}).servers[0].pages >= MIN_PAGES
    with pytest.raises(UserError, match="allowed: at least"):
        plan({"memory": least - (1 << 20)})


def test_refused_limit_names_the_one_for_a_whole_session() -> None:
    with pytest.raises(UserError) as refused:
        plan({"memory": "700Mi"})
    found = re.search(r"\((\d+Mi) for a session of 512 positions\)", refused.value.message)

    assert found is not None
    assert plan({"memory": found[1]}).full_sessions == 1


def test_sessions_that_do_not_fit_are_refused_with_both_cures() -> None:
    with pytest.raises(UserError) as refused:
        plan({"memory": "1Gi"}, sessions={"concurrent": 1000})
    found = re.search(r"at most (\d+), or a limit of (\d+Mi) or more", refused.value.message)

    assert refused.value.field == "spec.sessions.concurrent" and found is not None
    assert plan({"memory": "1Gi"}, sessions={"concurrent": int(found[1])}).full_sessions > 0
    assert plan({"memory": found[2]}, sessions={"concurrent": 1000}).full_sessions == 1000
    with pytest.raises(UserError, match="do not fit"):
        plan({"memory": "1Gi"}, sessions={"concurrent": int(found[1]) + 1})


def test_number_of_sessions_that_fit_is_that_of_all_servers() -> None:
    """The first server has room for more of them than the larger one behind it, and than the pool beside it."""
    ranges = [{"first": 0, "last": 1}, {"first": 1, "last": 8}]
    spec: dict[str, Any] = {
        "spans": {"ranges": ranges},
        "pools": [gpu_pool(memory="2Gi", host="3400Mi")],
    }
    with pytest.raises(UserError) as refused:
        plan(**spec, sessions={"concurrent": 5000})
    found = re.search(r"at most (\d+), or a limit of", refused.value.message)
    assert found is not None
    assert plan(**spec, sessions={"concurrent": int(found[1])}).full_sessions > 0


def test_more_spans_are_no_cure_if_none_are_small_enough() -> None:
    large = replace(FACTS, block_elements=100_000_000)
    limits = {"memory": "1900Mi"}
    with pytest.raises(UserError) as refused:
        plan(limits, facts=large, spans={"count": 2})
    assert "more spans" not in refused.value.message
    with pytest.raises(UserError, match="or more spans"):
        plan({"memory": "5Gi"}, facts=large, spans={"count": 1})
    assert len(plan({"memory": "5Gi"}, facts=large, spans={"count": 8}).servers) == 8
    pools = [gpu_pool(memory="6Gi", host="1Gi")]  # the container has no room for any span
    with pytest.raises(UserError, match=r"accelerator\.memory: ") as refused:
        plan(pools=pools, facts=large, spans={"count": 1})
    assert "more spans" not in refused.value.message


def test_refused_automatic_spans_name_the_field_of_their_limit() -> None:
    large = replace(FACTS, block_elements=100_000_000)
    for pool, field in ((gpu_pool(memory="1Gi"), "accelerator.memory"),
                        (gpu_pool(memory="80Gi", host="1Gi"), "resources.limits.memory")):  # fmt: skip
        with pytest.raises(UserError) as refused:
            plan(pools=[pool], spans={}, facts=large)
        assert refused.value.field == f"spec.pools[].{field}"


def gpu_pool(name: str = "a", memory: str | None = None, host: str | None = None) -> dict[str, Any]:
    """Return a pool whose servers have a GPU with this `memory`, in a container of `host` bytes."""
    limits = {"nvidia.com/gpu": 1} | ({"memory": host} if host else {})
    pool: dict[str, Any] = {"name": name, "resources": {"limits": limits}}
    return pool if memory is None else pool | {"accelerator": {"memory": memory}}


@pytest.mark.parametrize("spec", [{}, {"sessions": {"concurrent": 2}, "spans": {}}])
def test_gpu_of_unknown_memory_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        plan(GPU, **spec)
    assert refused.value.field == "spec.pools[0].accelerator.memory"
    assert "no node that matches it has the label nvidia.com/gpu.memory" in refused.value.message


def test_gpu_pool_with_sessions_and_spans_is_planned() -> None:
    assert plan(GPU, sessions={"concurrent": 2}).full_sessions == 2


def test_kv_fills_nine_tenths_of_the_accelerator() -> None:
    server = plan(pools=[gpu_pool(memory="1Gi")]).servers[0]
    page = PAGE_SIZE * 8 * FACTS.kv_bytes("float32") * 33 // 32 + 1
    assert 0.9 * (1 << 30) - page < server.memory.total <= 0.9 * (1 << 30)
    assert (server.memory.process, server.memory.retained) == (CONTEXT_BYTES, 0)
    assert server.host is not None
    assert server.host.process == DEVICE_PROCESS_BYTES and server.host.kv == 0
    assert server.host.weights == server.memory.weights  # they pass through it


def test_experts_are_not_copied_on_a_device() -> None:
    """Their blocks stay as transformers loads them. One of DeepSeek-V3 has 23 GB, and counted 69."""
    config = replace(FACTS.config, family="mixtral", hidden=4096)
    facts = replace(FACTS, config=config, block_elements=1_400_000_000)
    memory = device_memory(facts, Span(0, 1), "bfloat16", PAGE_SIZE, max_length=512)
    assert memory.activations < memory.weights / 2


def test_container_beside_a_device_has_room_to_join_experts() -> None:
    config = replace(FACTS.config, family="mixtral", hidden=4096)
    facts = replace(FACTS, config=config, block_elements=1_400_000_000)
    memory = host_memory(facts, Span(0, 1), "bfloat16", PAGE_SIZE)
    assert 0.6 * memory.weights < memory.activations < 0.7 * memory.weights
    assert host_memory(FACTS, Span(0, 1), "bfloat16", PAGE_SIZE).activations == 0


def test_planned_sessions_leave_the_context_of_a_device_free() -> None:
    most = plan(pools=[gpu_pool(memory="10Gi")]).full_sessions
    server = plan(pools=[gpu_pool(memory="10Gi")], sessions={"concurrent": most}).servers[0]
    tensors = server.memory.weights + server.memory.activations + server.memory.kv
    assert tensors + CONTEXT_BYTES <= 0.9 * (10 << 30)
    with pytest.raises(UserError, match=f"allowed: at most {most}, or a limit of"):
        plan(pools=[gpu_pool(memory="10Gi")], sessions={"concurrent": most + 1})


def test_accelerator_known_from_nodes_is_planned_alike() -> None:
    stated = plan(pools=[gpu_pool(memory="1Gi")])
    found = plan(pools=[gpu_pool()], node_memory={"a": 1 << 30})
    assert found == stated
    assert plan(pools=[gpu_pool(memory="1Gi")], node_memory={"a": 1 << 20}) == stated


def test_smallest_accelerator_of_all_pools_counts() -> None:
    pools = [gpu_pool("a", "2Gi"), gpu_pool("b", "1Gi")]
    assert plan(pools=pools).servers == plan(pools=[gpu_pool(memory="1Gi")]).servers


def test_container_beside_an_accelerator_is_planned_apart() -> None:
    """The container has the process and a row for every position, so it limits the pages too."""
    wide = plan(pools=[gpu_pool(memory="2Gi")]).servers[0]
    limit = DEVICE_PROCESS_BYTES + (182 << 20)
    narrow = plan(pools=[gpu_pool(memory="2Gi", host=f"{limit >> 20}Mi")]).servers[0]
    assert wide.host is not None and wide.host.total > limit
    assert narrow.host is not None and narrow.host.total <= limit
    assert 0 < narrow.pages < wide.pages
    with pytest.raises(UserError, match=r"resources\.limits\.memory: .*process 3 GiB"):
        plan(pools=[gpu_pool(memory="2Gi", host="2Gi")])


def test_accelerator_too_small_names_the_one_that_works() -> None:
    with pytest.raises(UserError) as refused:
        plan(pools=[gpu_pool(memory="70Mi")])
    found = re.search(
        r"0\.9 of the accelerator's\); allowed: at least (\d+Mi)", refused.value.message
    )
    assert refused.value.field == "spec.pools[].accelerator.memory" and found is not None
    assert plan(pools=[gpu_pool(memory=found[1])]).servers[0].pages >= MIN_PAGES


def test_spans_of_an_accelerator_are_as_few_as_fit() -> None:
    large = replace(FACTS, block_elements=10_000_000)
    counts = [
        len(plan(pools=[gpu_pool(memory=memory)], spans={}, facts=large).servers)
        for memory in ("8Gi", "1270Mi", "1090Mi")
    ]
    assert counts == sorted(counts) and counts[0] == 1 < counts[1] < counts[2]
    with pytest.raises(UserError) as refused:
        plan(pools=[gpu_pool(memory="650Mi")], spans={}, facts=large)
    least = re.search(r"has 650 MiB; allowed: at least (\d+Mi)", refused.value.message)
    assert least is not None
    assert len(plan(pools=[gpu_pool(memory=least[1])], spans={}, facts=large).servers) == 8


def test_pools_with_and_without_accelerator_share_a_plan() -> None:
    cpu = {"name": "b", "resources": {"limits": {"memory": "1Gi"}}}
    mixed = plan(pools=[gpu_pool(memory="660Mi"), cpu]).servers[0]
    alone = plan(pools=[gpu_pool(memory="660Mi")]).servers[0]
    assert mixed.pages == alone.pages
    assert mixed.memory.process == PROCESS_BYTES and mixed.memory.total <= 1 << 30


def test_memory_of_an_accelerator_has_its_context_and_no_rows() -> None:
    memory = device_memory(FACTS, WHOLE, "float32", PAGE_SIZE, 512).with_pages(10)
    assert (memory.process, memory.retained) == (CONTEXT_BYTES, 0)
    assert memory.kv == make_memory().with_pages(10).kv


def test_sampler_of_an_accelerator_takes_all_rows_at_once() -> None:
    large = replace(FACTS, config=replace(FACTS.config, vocab=128_256))
    assert sample_rows(128_256) == 6
    models = [m(large, WHOLE, "float32", PAGE_SIZE, 512) for m in (server_memory, device_memory)]
    on_cpu, on_device = (model.activations for model in models)
    assert on_device - on_cpu == (LOGIT_ROWS - 6) * 128_256 * SAMPLE_BYTES_PER_LOGIT


def test_memory_of_passes_is_part_of_the_plan() -> None:
    limit = {"memory": "2Gi"}
    without, given = plan(limit), plan(limit, training={"memory": "512Mi"})
    assert (without.training_memory, given.training_memory) == (None, 512 << 20)
    server = given.servers[0]
    assert server.memory.training == 512 << 20 and "training 512 MiB" in str(server.memory)
    assert server.memory.total <= 2 << 30
    assert server.pages < without.servers[0].pages
    none = plan(limit, training={"memory": 0})
    assert none.training_memory == 0 and none.servers == without.servers
    assert plan(limit, training={"memory": "0Mi"}) == none


def test_memory_of_passes_is_on_device_and_in_container() -> None:
    pools = [gpu_pool(memory="2Gi")]
    server = plan(pools=pools, training={"memory": "512Mi"}).servers[0]
    assert server.memory.training == 512 << 20 and server.memory.total <= 0.9 * (2 << 30)
    assert server.host is not None and server.host.training == 512 << 20


@pytest.mark.parametrize("memory", ["500m", "8Gi"])
def test_memory_of_passes_that_cannot_be_is_refused(memory: str) -> None:
    with pytest.raises(UserError, match=r"spec\.training\.memory: |training 8 GiB.*has 2 GiB"):
        plan({"memory": "2Gi"}, training={"memory": memory})


def test_full_sessions_need_their_pages_beside_the_reserve() -> None:
    assert [full_sessions(pages, 32) for pages in (2, 3, 4, 5)] == [0, 1, 1, 2]
    assert full_sessions(10, 32, page_size=32) == 9


def test_numbers_before_the_next_unit_are_written_whole() -> None:
    for power, unit in enumerate(("B", "KiB", "MiB", "GiB", "TiB")):
        for value in range(1000, 1024):
            assert human_bytes(value << 10 * power) == f"{value} {unit}"


def test_numbers_that_round_up_take_the_next_unit() -> None:
    assert human_bytes((1 << 20) - 1) == "1 MiB"
    assert human_bytes((1 << 30) - 1) == "1 GiB"
    assert human_bytes(1023 << 50) == "1047552 TiB"
    assert [human_bytes(size) for size in (0, 1, 999, 1536, 999 << 10)] == [
        "0 B",
        "1 B",
        "999 B",
        "1.5 KiB",
        "999 KiB",
    ]


def test_quantities_are_rounded_up_to_what_documents_take() -> None:
    assert [quantity_of(size) for size in (0, 1, 10 << 20, (10 << 20) + 1)] == [
        "0Ki",
        "1Ki",
        "10Mi",
        "11Mi",
    ]
    assert limit_at_least((1 << 30) + 1) == "1025Mi"
    assert bytes_of(quantity_of(123_456_789), "memory") >= 123_456_789
