"""Every promise of the README, every invariant and every interface has a test in the fast tier, named here.

A promise is reported if pytest does not collect its test for `make test`: it is marked `full`, or deleted. A new
promise of the README without a row here is reported, too. An identifier without parameters stands for at least one of
the test's cases.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tools.ci import run_tests

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
Promises = dict[str, tuple[str, ...]]

UNIT = "tests/unit"
CORE = "tests/core"
API = "tests/processes/api"
CLI = "tests/processes/cli"
GATEWAY = "tests/processes/gateway"
RECOVERY = "tests/processes/recovery"
SERVER = "tests/processes/server"
OPERATOR = "tests/cluster/operator"
REAL = "tests/cluster/real"

KILLS = (
    f"{RECOVERY}/test_kills_hash.py::test_kill_during_decode_keeps_answer_exact",
    f"{RECOVERY}/test_kills_hash.py::test_kill_during_prefill_keeps_answer_exact",
    f"{RECOVERY}/test_kills_hash.py::test_kill_between_turns_keeps_next_turn_exact",
    f"{API}/test_http_faults.py::test_stream_keeps_its_tokens_when_a_server_is_killed",
)
POD_LOSSES = (
    f"{REAL}/test_end_to_end.py::test_stream_goes_on_after_a_pod_is_deleted",
    f"{REAL}/test_end_to_end.py::test_stream_goes_on_after_a_container_is_killed",
)
DRAIN = (f"{RECOVERY}/test_drain.py::test_draining_every_server_in_turn_disturbs_no_stream",)
ONLY_THE_SPAN = (f"{RECOVERY}/test_span_only.py::test_only_lost_blocks_are_computed_again",)
QUICKSTART = (
    f"{REAL}/test_quickstart.py::test_quickstart_chats_through_the_service",
    f"{REAL}/test_quickstart.py::test_rest_of_the_quickstart_leaves_nothing",
    f"{UNIT}/repository/test_readme_cluster.py::test_readme_commands_are_quickstart_commands_in_order",
)
SPLITS = f"{SERVER}/test_span.py::test_greedy_tokens_equal_transformers_for_every_split"
FAMILIES = "tests/processes/server/test_families.py::test_tokens_equal_generate_for_every_split"
SEEDS = f"{SERVER}/test_span.py::test_seeded_sampling_ignores_split_and_batch_mix"
SIMULATED = (
    f"{CORE}/simulation/test_simulation.py::test_sessions_get_the_reference_tokens_under_faults"
)
PLANTED = f"{CORE}/simulation/test_planted_bugs.py::test_planted_bug_is_found_in_half_budget"
FACTS = f"{UNIT}/shared/test_checkpoint_facts.py::test_facts_equal_those_of_transformers"
SHOWN = f"{CLI}/test_readme.py"

SENTENCES: Promises = {  # parts of the README's sentences, unchanged
    "keep every stream alive when one of its pods dies": POD_LOSSES,
    "No token is lost, doubled or changed": KILLS,
    "The transformer blocks of the model are cut into **spans**": (f"{SPLITS}[llama]",),
    "only the lost span is computed again": ONLY_THE_SPAN,
    "A Kubernetes **operator** replaces the lost server": (
        f"{OPERATOR}/test_pod_failures.py::test_failed_pod_is_replaced",
    ),
    "it builds Kubernetes from its Go modules once": (
        f"{UNIT}/repository/test_devcluster.py::test_plan_names_the_missing_parts",
    ),
    "Any OpenAI client works": (
        f"{API}/test_http.py::test_the_openai_client_works_whole_and_streamed",
        f"{SHOWN}::test_the_curl_request_streams_the_count",
    ),
    "A swarm is one document, the same here and in a cluster": (
        f"{SHOWN}::test_the_document_is_a_swarm",
        "tests/cluster/api/test_crd_admission.py::test_every_example_is_accepted",
    ),
    "Families: Llama, Qwen, Mistral, Gemma, Mixtral, DeepSeek, GPT-OSS, Phi-3, Falcon, BLOOM, GPT-2": (
        *(f"{FACTS}[{family}]" for family in ("llama", "qwen2", "qwen3", "mistral", "gemma2")),
        *(f"{FACTS}[gemma3]", f"{SPLITS}[gemma3]", f"{FACTS}[phi3]"),
        *(f"{FAMILIES}[{name}]" for name in ("mixtral", "deepseek_v3", "gpt_oss", "falcon_new")),
        *(f"{FAMILIES}[{name}]" for name in ("bloom", "gpt2")),
    ),
    "It replaces lost servers and servers on cordoned nodes": (
        f"{OPERATOR}/test_pod_failures.py::test_cordon_starts_replacements_before_pods_go",
    ),
    "rolls out changes one server at a time": (
        f"{UNIT}/operator/test_rollout.py::test_rollout_replaces_one_slot_per_span_and_surges_first",
    ),
    "Conditions and Events report problems and the action that they need": (
        f"{UNIT}/operator/status/test_conditions.py::test_uncovered_span_is_named_with_its_cause",
        f"{UNIT}/operator/status/test_events.py::test_events_follow_the_transitions_of_a_swarm",
    ),
    "which a test runs word for word": QUICKSTART,
    "every answer is checked": ("tests/chaos/test_oracle.py::test_a_wrong_answer_is_found",),
}
COMPARISON: Promises = {
    "the running stream": (*KILLS, *POD_LOSSES),
    "computed again": ONLY_THE_SPAN,
    "healthy pods of the group": (
        f"{UNIT}/operator/test_slot_filler.py::test_failing_slot_leaves_other_slots_alone",
    ),
    "sampling after the failure": (KILLS[0], SEEDS),
    "time from kill to next token": (),  # measured by `make bench`, as a test of a speed would be flaky
    "planned drain": DRAIN,
}
COMMANDS: Promises = {
    "make demo": (f"{CLI}/test_demo.py::test_make_demo_counts_to_200_through_the_kill",),
    "modelswarm up": (
        f"{CLI}/test_up.py::test_killed_server_is_replaced_and_answers_stay_the_same",
        f"{CLI}/test_up.py::test_stopped_up_leaves_no_process_and_no_file",
    ),
    "modelswarm chat": (f"{SHOWN}::test_chat_is_one_session_over_its_turns",),
    "modelswarm logs": (f"{CLI}/test_start.py::test_lines_tell_each_phase_without_a_terminal",),
    "modelswarm drain": (f"{SHOWN}::test_drain_empties_a_server", *DRAIN),
    "make test": (f"{UNIT}/repository/test_run_tests.py::test_fast_tier_counts_and_never_repeats",),
    "modelswarm plan": (f"{SHOWN}::test_plan_prints_spans_and_room",),
    "modelswarm generate": (f"{SHOWN}::test_generate_goes_on_with_the_text",),
    "modelswarm status": (f"{SHOWN}::test_status_shows_servers",),
    "modelswarm routes": (f"{SHOWN}::test_routes_shows_costs",),
    "curl http": (f"{SHOWN}::test_the_curl_request_streams_the_count",),
    "make cluster": QUICKSTART,
    "helm install": QUICKSTART,
    "kubectl apply": QUICKSTART,
    "make chaos": ("tests/chaos/test_chaos.py::test_printed_command_repeats_the_run",),
}
PORTS: Promises = {
    "8000": (
        f"{API}/test_http.py::test_a_chat_is_answered_whole_with_usage",
        f"{API}/test_http.py::test_text_completion_has_sixteen_tokens_by_default",
        f"{API}/test_http.py::test_models_are_listed_and_found",
        f"{API}/test_http.py::test_health_and_readiness",
    ),
    "8001": (
        f"{API}/test_grpc.py::test_one_answer_has_text_tokens_position_and_usage",
        f"{API}/test_grpc.py::test_health_is_per_service",
        f"{API}/test_grpc.py::test_reflection_names_the_services",
        f"{API}/test_grpc.py::test_clients_port_has_no_admin_calls",
    ),
    "8002": (f"{API}/test_http.py::test_the_metrics_count_what_happened",),
    "8003": (
        f"{API}/test_grpc.py::test_the_swarm_lists_servers_and_sessions",
        f"{API}/test_grpc.py::test_health_is_per_service",
        f"{API}/test_grpc.py::test_reflection_names_the_services",
    ),
}
INVARIANTS: Promises = {
    "I1 Truth": (
        f"{RECOVERY}/test_kills_hash.py::test_kill_between_turns_keeps_next_turn_exact",
        f"{CORE}/server/test_fencing.py::test_server_lost_at_any_moment_costs_no_token",
        f"{SIMULATED}[kills-range(0, 2)]",
        f"{CORE}/simulation/test_simulation.py::test_sessions_of_killed_gateway_are_taken_over",
    ),
    "I2 Exactly once": (
        f"{SIMULATED}[duplicates-range(0, 2)]",
        f"{PLANTED}[R1 accepts rows twice]",
        f"{PLANTED}[R2 starts twice]",
        f"{CORE}/gateway/test_session_tokens.py::test_repeated_token_is_appended_once",
        f"{CORE}/gateway/test_session_tokens.py::test_token_beyond_log_end_is_a_gap",
    ),
    "I3 Order": (
        f"{API}/test_http.py::test_tokens_come_once_in_order_and_match_the_text",
        f"{API}/test_http_faults.py::test_stream_keeps_its_tokens_when_a_server_is_killed",
        f"{PLANTED}[R4 accepts late tokens]",
    ),
    "I4 Determinism": (
        f"{UNIT}/serving/sampling/test_sampler.py::test_sampled_token_is_independent_of_the_batch",
        f"{UNIT}/serving/sampling/test_sampler.py::test_seed_choice_and_position_each_change_the_noise",
        SEEDS,
    ),
    "I5 No leak": (
        f"{CORE}/server/test_admission.py::test_200_dropped_sessions_free_all_pages",
        f"{CORE}/server/test_admission.py::test_sessions_of_lost_gateway_are_freed_at_twice_the_lease",
        f"{API}/test_http_faults.py::test_two_hundred_dropped_sessions_free_all_pages",
        f"{SERVER}/test_process.py::test_pages_of_lost_gateway_are_free_after_its_lease",
        f"{PLANTED}[I5 never closes]",
    ),
    "I6 Admission": (
        f"{CORE}/server/test_admission.py::test_create_reserves_pages_and_keeps_a_tenth_for_recovery",
        f"{API}/test_http_faults.py::test_request_without_room_is_refused_with_retry_after",
        f"{PLANTED}[R11 grants full windows]",
        f"{SIMULATED}[tight-range(0, 2)]",
    ),
    "I7 Isolation": (
        f"{API}/test_http_faults.py::test_slow_reader_pauses_only_its_own_session",
        f"{CORE}/server/flow/test_flow_control.py::test_session_with_lost_rows_delays_no_other_session",
        f"{PLANTED}[I7 fails all hops]",
        f"{SIMULATED}[poison-range(0, 2)]",
        f"{SIMULATED}[bursts-range(0, 2)]",
    ),
    "I8 Honest end": (
        f"{API}/test_http_faults.py::test_stream_that_cannot_be_saved_ends_with_one_error",
        f"{CORE}/gateway/test_hold_limit.py::test_held_session_ends_exactly_at_hold_limit",
    ),
}
INTERFACES: Promises = {
    "HTTP": (*PORTS["8000"], f"{API}/test_http.py::test_bad_requests_get_openais_envelope"),
    "gRPC": (*PORTS["8001"], f"{API}/test_grpc.py::test_http_and_grpc_give_the_same"),
    "command line": tuple(ids[0] for name, ids in COMMANDS.items() if "modelswarm" in name),
    "operator": (
        f"{OPERATOR}/test_convergence.py::test_swarm_becomes_pods_service_budgets_and_status",
        f"{OPERATOR}/test_leader_election.py::test_standby_leads_after_the_leader_is_killed",
        f"{OPERATOR}/test_api_faults.py::test_operator_goes_on_after_an_api_server_kill",
    ),
    "chart": (
        f"{REAL}/test_chart.py::test_every_values_file_gives_accepted_flags",
        f"{REAL}/test_chart_install.py::test_upgrade_changes_and_rollback_restores",
        f"{REAL}/test_quickstart.py::test_helm_test_gets_a_completion",
    ),
    "gateways": (
        f"{GATEWAY}/test_takeover.py::test_stream_of_killed_gateway_goes_on_at_another",
        f"{GATEWAY}/test_takeover.py::test_stopped_gateway_hands_its_streams_over",
    ),
}
TABLES = (SENTENCES, COMPARISON, COMMANDS, PORTS, INVARIANTS, INTERFACES)
UNTESTED = {"time from kill to next token"}


def test_promised_tests_are_in_the_fast_tier() -> None:
    wanted = {test for table in TABLES for tests in table.values() for test in tests}
    assert missing_tests(ROOT, wanted) == []
    paths = [Path(path) for lane in run_tests.LANES["fast"] for part in lane for path in part.paths]
    assert [
        test for test in wanted if not any(map(Path(file_of(test)).is_relative_to, paths))
    ] == []


def test_every_promise_has_a_test() -> None:
    empty = {name for table in TABLES for name, tests in table.items() if not tests}
    assert empty == UNTESTED


def test_every_sentence_of_the_table_is_in_the_readme() -> None:
    text = " ".join(README.split())
    assert [sentence for sentence in SENTENCES if sentence not in text] == []


def test_every_row_of_the_readme_is_in_a_table() -> None:
    assert first_cells(README, "when one pod of a multi-pod model dies") == list(COMPARISON)
    assert re.findall(r"^- \*\*(\d+)\*\*: ", README, re.MULTILINE) == list(PORTS)
    assert shown_commands(README) == set(COMMANDS)


def test_every_invariant_is_in_a_table() -> None:
    assert first_cells(ARCHITECTURE, "") == list(INVARIANTS)


def test_rows_are_found_under_their_heading() -> None:
    page = "| a | b |\n|---|---|\n| 1 | 2 |\n\n| port | what |\n|---|---|\n| 5 | x |\n| 6 | y |\n"
    assert first_cells(page, "port") == ["5", "6"]


def test_full_skipped_and_deleted_tests_are_reported(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        "[tool.pytest.ini_options]\nmarkers = ['full', 'soak']\n"
    )
    (tmp_path / "test_file.py").write_text("""
import pytest

def test_fast():
    pass

@pytest.mark.full
def test_slow():
    pass

@pytest.mark.parametrize("case", [1, pytest.param(2, marks=pytest.mark.full)])
def test_cases(case):
    pass

@pytest.mark.skip
def test_skipped():
    pass
""")
    names = ("fast", "slow", "deleted", "cases", "cases[1]", "cases[2]", "skipped")
    wanted = [f"test_file.py::test_{name}" for name in names] + ["test_absent.py::test_it"]
    assert missing_tests(tmp_path, wanted) == [
        "test_absent.py::test_it",
        "test_file.py::test_cases[2]",
        "test_file.py::test_deleted",
        "test_file.py::test_skipped",
        "test_file.py::test_slow",
    ]


def missing_tests(root: Path, wanted: Iterable[str]) -> list[str]:
    """Return the tests of `wanted` that pytest does not collect for the fast tier, or that are skipped."""
    tests = sorted(set(wanted))
    files = [file for file in sorted(set(map(file_of, tests))) if (root / file).exists()]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-m", f"({run_tests.MARKERS['fast']}) and not skip", *files],
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cases = {line for line in done.stdout.splitlines() if "::" in line}
    collected = cases | {case.partition("[")[0] for case in cases}
    return [test for test in tests if test not in collected]


def file_of(test: str) -> str:
    return test.partition("::")[0]


def first_cells(page: str, heading: str) -> list[str]:
    """Return the first cell of each row of the table whose first column has this heading."""
    found = re.search(
        rf"^\| ?{re.escape(heading)} ?\|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE
    )
    assert found is not None, f"no table with the column {heading!r}"
    return [line.split("|")[1].strip() for line in found[1].splitlines()]


def shown_commands(page: str) -> set[str]:
    """Return the program and verb of each command in the page's code blocks, except those that only prepare or wait."""
    blocks = re.findall(r"^```(?:bash|yaml)?\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    command = re.compile(
        r"^(?:\.venv/bin/)?((?:make|modelswarm|curl|helm|kubectl) \w+)", re.MULTILINE
    )
    shown = {found for block in blocks for found in command.findall(block)}
    return shown - {"kubectl create", "kubectl config", "kubectl wait", "kubectl get"}


def test_commands_are_found_in_code_blocks_only() -> None:
    page = "```\nmake a  # b\n.venv/bin/modelswarm c d\n```\nmake no\n```bash\nhelm e f\n```\n"
    assert shown_commands(page) == {"make a", "modelswarm c", "helm e"}
