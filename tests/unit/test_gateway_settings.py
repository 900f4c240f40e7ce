"""Flags of a gateway process: what they mean together, and which contradict each other."""

from __future__ import annotations

import pytest

from modelswarm.errors import UserError
from modelswarm_gateway.settings import parse

MEMBERS = ("--members", "/tmp/members")


@pytest.mark.parametrize(
    ("flags", "seconds"),
    (
        ((), 5.0),
        (("--hold", "0"), 5.0),  # nobody is ever held
        (("--hold", "2"), 1.0),
        (("--hold", "30", "--keepalive", "29"), 29.0),
        (("--hold", "0", "--keepalive", "29"), 29.0),
    ),
)
def test_who_waits_hears_something_before_the_hold_is_over(
    flags: tuple[str, ...], seconds: float
) -> None:
    assert parse([*MEMBERS, *flags]).keepalive_seconds == seconds


def test_a_sign_of_life_that_comes_after_the_hold_is_refused() -> None:
    with pytest.raises(UserError) as refused:
        parse([*MEMBERS, "--hold", "20", "--keepalive", "20"])
    assert refused.value.field == "--keepalive"
    assert "--hold 20 s" in refused.value.message
