"""`wait_for` retries while a server does not respond, and ends at once when it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest
from support.kubernetes.api_client import checked_json

from tools.devcluster.control_plane.api_level import ApiLevel
from tools.devcluster.control_plane.kubectl import CommandFailed, Kubectl
from tools.devcluster.waiting import WaitTimeout, wait_for

NOWHERE = "https://127.0.0.1:1"
Look = Callable[[], object]


def answer(code: int) -> Look:
    request = httpx.Request("GET", NOWHERE)
    return lambda: checked_json(httpx.Response(code, request=request, text=f"said {code}"))


def one_after_the_other(*looks: Look) -> Look:
    left: Iterator[Look] = iter(looks)
    return lambda: next(left)()


@pytest.fixture
def away(api: ApiLevel) -> Kubectl:
    """Return a client of an API server that does not run."""
    return Kubectl(api.user_kubeconfig("admin", "system:masters", NOWHERE))


def test_unanswered_question_is_asked_again(away: Kubectl) -> None:
    looks = (
        *(answer(code) for code in (429, 500, 503)),
        lambda: httpx.get(NOWHERE),
        lambda: away.items("pods"),
        lambda: away.in_namespace("other").find("pod", "one"),
        lambda: "seen",
    )
    assert wait_for("it", one_after_the_other(*looks), 300, every=0.01) == "seen"


def test_timeout_names_the_last_error_and_the_explanation(away: Kubectl) -> None:
    with pytest.raises(WaitTimeout, match=r"(?s)said 503.*127\.0\.0\.1:1 was refused"):
        wait_for("it", answer(503), 0.1, explain=lambda: away("describe", "pod", "one"))


def test_refusal_ends_the_wait(api: ApiLevel, away: Kubectl) -> None:
    for code in (400, 401, 403, 404, 409, 422):
        with pytest.raises(httpx.HTTPStatusError, match=f"said {code}"):
            wait_for("it", one_after_the_other(answer(code)), 30)
    with pytest.raises(CommandFailed, match="NotFound"):
        wait_for("it", one_after_the_other(lambda: api.kubectl.get("configmap", "none")), 30)
    with pytest.raises(CommandFailed, match="refused"):  # the request may have had its effect
        wait_for("it", one_after_the_other(lambda: away("delete", "pod", "one")), 30)
