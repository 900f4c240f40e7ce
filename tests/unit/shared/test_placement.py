"""Spans cover the model exactly, slots cover the spans, and a plan never exceeds the available memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from modelswarm.checkpoint.facts import ModelConfig, ModelFacts
from modelswarm.checkpoint.tensor_names import MAX_BLOCKS
from modelswarm.errors import UserError
from modelswarm.placement.plan import PAGE_SIZE, plan_swarm
from modelswarm.placement.quantity import bytes_of, human_bytes
from modelswarm.placement.replay_memory import GROUP_OVERHEAD
from modelswarm.placement.slots import coverage, slots_of
from modelswarm.placement.spans import Span, automatic_spans, even_spans, given_spans
from modelswarm.resources.spec import ModelSwarm

FACTS = ModelFacts(
    config=ModelConfig("llama", n_blocks=8, hidden=64, vocab=320, context=512, tied=False),
    dtype="float32",
    block_elements=10_000,
    embedding_elements=64 * 320,
    kv_elements=64,
)
BLOCK = 40_000  # bytes in float32
TABLE = 64 * 320 * 4
KV = 256  # bytes per position and block
ROW = 64 * 4 + GROUP_OVERHEAD  # bytes of a retained row


def make_swarm(**spec: Any) -> ModelSwarm:
    return ModelSwarm.parse(
        {
            "apiVersion": "modelswarm.io/v1alpha1",
            "kind": "ModelSwarm",
            "metadata": {"name": "tiny"},
            "spec": {"model": {"source": "file:///tiny"}, **spec},
        }
    )


def make_pool(memory: str) -> dict[str, Any]:
    return {"name": "cpu", "resources": {"limits": {"memory": memory}}}


def test_even_spans_cover_the_model_without_gap_or_overlap() -> None:
    for n_blocks in range(1, 41):
        for count in range(1, n_blocks + 1):
            spans = even_spans(n_blocks, count)
            sizes = [span.blocks for span in spans]

            covered = [block for span in spans for block in range(span.first, span.last)]
            assert covered == list(range(n_blocks))
            assert len(spans) == count
            assert max(sizes) - min(sizes) <= 1
            assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("count", [0, 9])
def test_span_count_outside_the_block_count_is_refused(count: int) -> None:
    with pytest.raises(UserError, match=r"spec\.spans\.count: .* allowed: 1 to 8"):
        even_spans(8, count)


def test_given_ranges_become_spans_unchanged() -> None:
    assert given_spans(8, [(0, 1), (1, 8)]) == (Span(0, 1), Span(1, 8))


@pytest.mark.parametrize(
    ("ranges", "path"),
    [
        ([(0, 4)], r"spec\.spans\.ranges: they end at block 4, but the model has 8"),
        ([(0, 4), (4, 9)], r"spec\.spans\.ranges: they end at block 9, but the model has 8"),
        ([(0, 4), (5, 8)], r"spec\.spans\.ranges\[1\]: .* allowed: first: 4"),
        ([(0, 4), (4, 4), (4, 8)], r"spec\.spans\.ranges\[1\]: "),
    ],
)
def test_ranges_that_do_not_cover_the_model_are_refused(
    ranges: list[tuple[int, int]], path: str
) -> None:
    with pytest.raises(UserError, match=path):
        given_spans(8, ranges)


def test_automatic_spans_are_as_few_as_fit() -> None:
    def needed(span: Span) -> int:
        return 10 * span.blocks

    assert len(automatic_spans(8, needed, None)) == 1
    assert len(automatic_spans(8, needed, 80)) == 1
    assert len(automatic_spans(8, needed, 79)) == 2
    assert len(automatic_spans(8, needed, 30)) == 3
    assert len(automatic_spans(8, needed, 10)) == 8
    with pytest.raises(UserError, match="a server of one of 8 spans still needs 10 B of memory"):
        automatic_spans(8, needed, 9)


@pytest.mark.parametrize("n_blocks", [1, 2, 3, 7, 32, 61])
@pytest.mark.parametrize(("head", "tail"), [(0, 0), (25, 0), (0, 25), (40, 15)])
def test_automatic_spans_equal_the_first_count_that_fits(
    n_blocks: int, head: int, tail: int
) -> None:
    def needed(span: Span) -> int:
        return 10 * span.blocks + head * (span.first == 0) + tail * (span.last == n_blocks)

    for available in range(10 + head + tail, 10 * n_blocks + head + tail + 1):
        counts = range(1, n_blocks + 1)
        splits = (even_spans(n_blocks, count) for count in counts)
        fitting = (spans for spans in splits if max(map(needed, spans)) <= available)
        assert automatic_spans(n_blocks, needed, available) == next(fitting)


def test_automatic_spans_look_at_every_span() -> None:
    """The largest span is the third of four, as in a model whose first blocks have no experts."""

    def needed(span: Span) -> int:
        return sum(10 if block in (4, 5) else 1 for block in range(*span))

    assert len(automatic_spans(8, needed, 20)) == 4
    assert len(automatic_spans(8, needed, 10)) == 6


def test_deepest_model_is_split_in_few_operations() -> None:
    asked: list[Span] = []

    def needed(span: Span) -> int:
        asked.append(span)
        return span.blocks

    assert len(automatic_spans(MAX_BLOCKS, needed, 100)) == 41
    assert len(asked) < 9 * 256, "all spans for each step of a bisection over 256 counts"
    with pytest.raises(UserError, match="a server of one of 256 spans still needs 16 B"):
        automatic_spans(MAX_BLOCKS, needed, 15)


def test_automatic_plan_of_too_many_servers_is_refused() -> None:
    facts = replace(FACTS, config=replace(FACTS.config, n_blocks=MAX_BLOCKS))
    many = make_swarm(pools=[make_pool("1Gi")], replicas=1000)

    with pytest.raises(UserError, match=r"^spec\.replicas: 1000 servers for each of \d+ spans are"):
        plan_swarm(many, facts, "file:///tiny")


def test_slots_cover_every_span_and_ordinal_with_unique_names() -> None:
    spans = even_spans(8, 2)
    slots = slots_of("counting", spans, 3)

    assert {(slot.span, slot.ordinal) for slot in slots} == {
        (s, o) for s in spans for o in range(3)
    }
    assert len({slot.name for slot in slots}) == 6
    assert [slot.name for slot in slots[:3]] == [
        "counting-s0-r0",
        "counting-s1-r0",
        "counting-s0-r1",
    ]


def test_coverage_is_the_minimum_over_spans() -> None:
    one, two = even_spans(8, 2)

    assert coverage([one, two], [one, two, one]) == 1
    assert coverage([one, two], [one, one]) == 0
    assert coverage([one, two], []) == 0


def test_plan_has_pages_for_the_requested_sessions() -> None:
    for length in (1, 15, 16, 17, 500, 512):
        for concurrent in (1, 3, 8, 100):
            sessions = {"maxLength": length, "concurrent": concurrent}
            plan = plan_swarm(
                make_swarm(spans={"count": 3}, sessions=sessions), FACTS, "file:///tiny"
            )

            assert plan.full_sessions == concurrent
            for server in plan.servers:
                assert server.free_tokens >= length * concurrent


def test_plan_counts_weights_kv_and_replay_memory() -> None:
    plan = plan_swarm(make_swarm(spans={"count": 2}, replicas=2), FACTS, "file:///tiny")
    head, tail = plan.servers

    assert head.memory.weights == tail.memory.weights == 4 * BLOCK + TABLE
    assert head.kv_bytes_per_token == 4 * KV
    assert head.memory.kv == head.pages * PAGE_SIZE * 4 * KV
    assert head.memory.retained == head.pages * PAGE_SIZE * ROW
    assert plan.total_bytes == 2 * (head.memory.total + tail.memory.total)
    assert plan.max_length == 512


def test_plan_fills_the_pool_memory_without_exceeding_it() -> None:
    page = PAGE_SIZE * (4 * KV + ROW) * 33 // 32 + 1  # with its share of the margin
    plan = plan_swarm(
        make_swarm(spans={"count": 2}, pools=[make_pool("1Gi")]), FACTS, "file:///tiny"
    )

    for server in plan.servers:
        assert (1 << 30) - page < server.memory.total <= 1 << 30


def test_explicit_memory_overrides_the_pools() -> None:
    document = make_swarm(spans={"count": 2}, pools=[make_pool("1Ki")])

    plan = plan_swarm(document, FACTS, "file:///tiny", memory=2 << 30)

    assert plan.servers[0].memory.total > 1 << 30


def test_smaller_pool_memory_gives_more_automatic_spans() -> None:
    large = replace(FACTS, block_elements=10_000_000)
    whole = plan_swarm(make_swarm(pools=[make_pool("4Gi")]), large, "file:///tiny")
    split = plan_swarm(make_swarm(pools=[make_pool("1400Mi")]), large, "file:///tiny")

    assert len(whole.servers) == 1
    assert len(split.servers) > 1
    assert all(server.memory.total <= 1400 << 20 for server in split.servers)


GPU_TEMPLATE = {
    "spec": {"containers": [{"name": "server", "resources": {"limits": {"nvidia.com/gpu": 1}}}]}
}


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"sessions": {"maxLength": 513}}, r"spec\.sessions\.maxLength: .* allowed: 1 to 512"),
        ({"spans": {"count": 9}}, r"spec\.spans\.count: .* allowed: 1 to 8"),
        (
            {"spans": {"count": 1}, "pools": [make_pool("1Gi")], "sessions": {"concurrent": 999}},
            r"spec\.sessions\.concurrent: 999 sessions of 512 positions do not fit .* at most \d+",
        ),
        (
            {"spans": {"count": 1}, "pools": [make_pool("1Ki")]},
            r"memory: a server of blocks 0:8 needs",
        ),
        (
            {"pools": [make_pool("1Gi") | {"podTemplate": GPU_TEMPLATE}]},
            r"pools\[0\]\.podTemplate\.spec\.containers\[server\]\.resources\.limits: 1 nvidia.com/gpu .* allowed",
        ),
    ],
)
def test_impossible_plan_is_refused_with_its_field(spec: dict[str, Any], path: str) -> None:
    with pytest.raises(UserError, match=path):
        plan_swarm(make_swarm(**spec), FACTS, "file:///tiny")


@pytest.mark.parametrize(
    ("text", "size"),
    [("512Mi", 512 << 20), ("2G", 2_000_000_000), ("1.5Ki", 1536), ("7", 7), (7, 7)],
)
def test_memory_quantity_parses_as_in_kubernetes(text: str | int, size: int) -> None:
    assert bytes_of(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "Mi", "-1", "0", "1 GB", "1e9", "٣Mi"])
def test_invalid_memory_quantity_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"--memory: .* allowed: e\.g\. 512Mi or 2Gi"):
        bytes_of(text, "--memory")


def test_memory_size_is_shown_with_a_binary_unit() -> None:
    shown = [human_bytes(size) for size in (0, 1023, 1536, 5 << 20, 3 << 30, 2 << 40)]
    assert shown == ["0 B", "1023 B", "1.5 KiB", "5 MiB", "3 GiB", "2 TiB"]
