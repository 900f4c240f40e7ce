"""Wrong flags of the operator end it with one sentence and exit code 2, before it asks any API server."""

from __future__ import annotations

import pytest

from modelswarm_operator.app import main


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--server-image"),
        (["--server-image", "x", "--namespace", "UPPER"], "--namespace: 'UPPER' is not a name"),
        (["--server-image", "x", "--health", "8080"], "--health: '8080' is not HOST:PORT"),
        (["--server-image", "x"], "--lease-namespace: is needed outside of a cluster"),
        (
            ["--server-image", "x", "--no-leader-election", "--kubeconfig", "/none"],
            "--kubeconfig: /none: no such file",
        ),
        (
            ["--server-image", "x", "--pod-template", "/none"],
            "--pod-template: /none cannot be read",
        ),
        (
            ["--server-image", "x", "--gateway-url", "nowhere"],
            "--gateway-url: 'nowhere' is not a URL",
        ),
        (["--server-image", "x", "--resync", "0"], "--resync"),
    ],
)
def test_invalid_flag_ends_with_one_line_and_exit_code_2(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert len(shown.strip().splitlines()) == 1
