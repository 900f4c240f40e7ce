"""The dialer over the discovery folder: dials, backoff, unreachable servers, and invalid files."""

from __future__ import annotations

import json
from pathlib import Path

from modelswarm.protocol.identity import Address
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.discovery.dialer import (
    DEAD_SECONDS,
    FIRST_PAUSE,
    MAX_PAUSE,
    SETTLE_SECONDS,
    STABLE_SECONDS,
    Dialer,
)
from modelswarm_gateway.discovery.file_source import FileSource


class DialerHarness:
    """A dialer over a real folder, with a clock that tests move."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.dialled: list[str] = []
        self.dialer = Dialer(FileSource(folder), self._dial, lambda: self.now)

    def _dial(self, address: Address) -> None:
        self.dialled.append(address.peer)

    def write(self, name: str, peer: str, **more: object) -> None:
        partial = self.folder / f".{name}.tmp"
        partial.write_text(json.dumps({"peer": peer, "target": "127.0.0.1:9", **more}))
        partial.replace(self.folder / f"{name}.json")

    def poll(self, after: float = 0.0) -> list[str]:
        self.now += after
        self.dialled.clear()
        self.dialer.dial_due()
        return self.dialled[:]


def test_member_is_dialled_once_until_the_dial_ends(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    assert harness.poll() == []
    harness.write("s0", "s0/1/a", model="m", pid=1)
    assert harness.poll() == ["s0/1/a"]
    assert harness.poll(after=100) == []
    harness.dialer.on_peer_connected("s0/1/a", ["m"])
    assert harness.poll(after=100) == []


def test_failed_dials_back_off_exponentially(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.poll()
    pauses, pause = [], FIRST_PAUSE
    for _ in range(8):
        harness.dialer.on_peer_lost("s0/1/a", "refused")
        assert harness.poll(after=pause * 0.9) == []
        assert harness.poll(after=pause * 0.2) == ["s0/1/a"]
        pauses.append(pause)
        pause = min(2 * pause, MAX_PAUSE)
    assert pauses[-1] == MAX_PAUSE


def test_broken_link_is_redialled_after_the_first_pause(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.poll()
    for _ in range(6):
        harness.dialer.on_peer_lost("s0/1/a", "refused")
        harness.poll(after=MAX_PAUSE)
    harness.dialer.on_peer_connected("s0/1/a", ["m"])
    harness.dialer.on_peer_lost("s0/1/a", "refused")
    assert harness.poll(after=FIRST_PAUSE * 1.1) == ["s0/1/a"]


def test_links_that_break_at_once_are_redialled_ever_later(tmp_path: Path) -> None:
    """Each is two lines in the logs of two processes: ten in a second, for as long as the fault lasts."""
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.poll()
    pause = FIRST_PAUSE
    for _ in range(9):
        harness.dialer.on_peer_connected("s0/1/a", ["m"])
        harness.now += STABLE_SECONDS / 2
        harness.dialer.on_peer_lost("s0/1/a", "the peer violated the protocol")
        assert harness.poll(after=pause * 0.9) == []
        assert harness.poll(after=pause * 0.2) == ["s0/1/a"]
        pause = min(2 * pause, MAX_PAUSE)
    assert pause == MAX_PAUSE < GatewaySettings().relink_seconds
    harness.dialer.on_peer_connected("s0/1/a", ["m"])
    harness.now += STABLE_SECONDS
    harness.dialer.on_peer_lost("s0/1/a", "the connection is lost")
    assert harness.poll(after=FIRST_PAUSE * 1.1) == ["s0/1/a"]


def test_unlinked_server_has_the_reason_of_its_last_dial(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.poll()
    assert harness.dialer.unlinked_servers() == {"s0/1/a": ""}
    harness.dialer.on_peer_lost("s0/1/a", "refused")
    assert harness.dialer.unlinked_servers() == {"s0/1/a": "refused"}
    harness.dialer.on_peer_connected("s0/1/a", ["m"])
    assert harness.dialer.unlinked_servers() == {}


def test_removed_member_is_not_redialled(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.poll()
    (tmp_path / "s0.json").unlink()
    assert harness.poll(after=1) == []
    harness.dialer.on_peer_lost("s0/1/a", "refused")
    assert harness.poll(after=10) == []


def test_endpoint_that_returns_under_a_link_is_reachable(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.poll()
    harness.dialer.on_peer_connected("s0/1/a", ["m"])
    (tmp_path / "s0.json").unlink()
    harness.poll()
    harness.write("s0", "s0/1/a")
    assert harness.poll() == [], "its link is up, so no dial would end"
    assert harness.dialer.unreachable_servers("m") == []
    assert harness.dialer.unlinked_servers() == {}
    assert harness.dialer.is_settled()
    harness.dialer.on_peer_lost("s0/1/a", "broke")
    assert harness.poll(after=FIRST_PAUSE) == ["s0/1/a"]


def test_new_peer_in_the_same_file_is_dialled(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.poll()
    harness.write("s0", "s0/2/b")
    assert harness.poll() == ["s0/2/b"]
    harness.dialer.on_peer_lost("s0/1/a", "refused")
    assert harness.poll(after=10) == []


def test_invalid_run_files_are_ignored(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    (tmp_path / "half.json").write_text('{"peer": "x')
    (tmp_path / "other.json").write_text('{"peer": 5, "target": "t"}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "huge.json").write_text(" " * 100_000 + "{}")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / ".s1.1.tmp").write_text('{"peer": "x", "target": "t"}')
    (tmp_path / "notes.txt").write_text("hello")
    harness.write("s0", "s0/1/a")
    assert harness.poll() == ["s0/1/a"]
    harness.write("half", "s2/1/c")
    assert harness.poll() == ["s2/1/c"]


def test_folder_created_later_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    harness = DialerHarness(folder)
    assert harness.poll() == []
    folder.mkdir()
    harness.write("s0", "s0/1/a")
    assert harness.poll() == ["s0/1/a"]


def test_unlinked_server_is_unreachable_until_back_or_removed(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.poll()
    assert harness.dialer.unreachable_servers("m") == ["s0/1/a"], (
        "its first dial is still in progress"
    )
    harness.dialer.on_peer_connected("s0/1/a", ["m", "adapter"])
    assert harness.dialer.unreachable_servers("m") == []
    harness.dialer.on_peer_lost("s0/1/a", "broke")
    harness.poll(after=MAX_PAUSE)
    harness.dialer.on_peer_lost("s0/1/a", "no answer")
    for name in ("m", "adapter"):
        assert harness.dialer.unreachable_servers(name) == ["s0/1/a"]
    assert harness.dialer.unreachable_servers("another") == []
    assert harness.dialer.may_be_running("s0/1/a") and not harness.dialer.may_be_running("s1/1/a")
    harness.dialer.on_peer_connected("s0/1/a", ["m"])
    assert harness.dialer.unreachable_servers("m") == []
    assert not harness.dialer.may_be_running("s0/1/a"), "a linked server is not in question"
    harness.dialer.on_peer_lost("s0/1/a", "broke")
    (tmp_path / "s0.json").unlink()
    harness.poll()
    assert harness.dialer.unreachable_servers("m") == [], "its run file is gone"
    assert not harness.dialer.may_be_running("s0/1/a")


def test_server_that_never_returns_is_given_up(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.write("s1", "s1/1/a")
    harness.poll()
    harness.dialer.on_peer_lost("s1/1/a", "it loads")
    harness.dialer.on_peer_connected("s0/1/a", ["m"])
    harness.dialer.on_peer_lost("s0/1/a", "broke")
    for _ in range(round(DEAD_SECONDS / MAX_PAUSE)):
        assert harness.dialer.unreachable_servers("m") == ["s0/1/a"], (
            "a server whose first dial failed is starting"
        )
        harness.poll(after=MAX_PAUSE)
        harness.dialer.on_peer_lost("s0/1/a", "no answer")
    harness.poll(after=MAX_PAUSE)
    assert harness.dialer.unreachable_servers("m") == []
    assert not harness.dialer.may_be_running("s0/1/a")


def test_refused_connection_marks_the_server_as_dead(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.poll()
    harness.dialer.on_peer_connected("s0/1/a", ["m"])
    harness.dialer.on_peer_lost("s0/1/a", "broke")
    assert harness.dialer.unreachable_servers("m") == ["s0/1/a"]
    harness.poll(after=FIRST_PAUSE)
    harness.dialer.on_peer_lost("s0/1/a", "connect: Connection refused (111)")
    assert harness.dialer.unreachable_servers("m") == []
    assert not harness.dialer.may_be_running("s0/1/a")


def test_server_that_does_not_answer_holds_up_discovery(tmp_path: Path) -> None:
    """A busy server serves its model all the same: the gateway must not tell clients that there is none."""
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.poll()
    harness.dialer.on_peer_lost("s0/1/a", "127.0.0.1:9 did not answer in time")
    assert not harness.dialer.is_settled()
    harness.poll(after=SETTLE_SECONDS + 0.1)
    assert harness.dialer.is_settled(), "it has had the time to answer"


def test_server_that_has_ended_does_not_hold_up_discovery(tmp_path: Path) -> None:
    harness = DialerHarness(tmp_path)
    harness.write("s0", "s0/1/a")
    harness.poll()
    harness.dialer.on_peer_lost("s0/1/a", "Connection refused")
    assert harness.dialer.is_settled()
