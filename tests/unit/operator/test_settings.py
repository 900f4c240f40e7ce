"""Invalid flags end the operator with one line and exit code 2, before it calls an API server."""

from __future__ import annotations

import pytest

from modelswarm_operator.app import main


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "--server-image"),
        (["--server-image", "x", "--namespace", "UPPER"], "--namespace: 'UPPER' is not a name"),
        (["--server-image", "x", "--metrics", "8080"], "--metrics: '8080' is not HOST:PORT"),
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
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 2
    stderr = capsys.readouterr().err
    assert sentence in stderr
    assert len(stderr.strip().splitlines()) == 1
