"""The members folder as the gateway watches it: who is dialled, how often, and what cannot hurt."""

from __future__ import annotations

import json
from pathlib import Path

from modelswarm.protocol.identity import Address
from modelswarm_gateway.discovery.dialer import DEAD_SECONDS, FIRST_PAUSE, MAX_PAUSE, Dialer
from modelswarm_gateway.discovery.file_source import FileSource


class Watched:
    """A directory over a real folder, with a clock that is moved by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.dialled: list[str] = []
        self.directory = Dialer(FileSource(folder), self._dial, lambda: self.now)

    def _dial(self, address: Address) -> None:
        self.dialled.append(address.peer)

    def write(self, name: str, peer: str, **more: object) -> None:
        partial = self.folder / f".{name}.tmp"
        partial.write_text(json.dumps({"peer": peer, "target": "127.0.0.1:9", **more}))
        partial.replace(self.folder / f"{name}.json")

    def poll(self, after: float = 0.0) -> list[str]:
        self.now += after
        self.dialled.clear()
        self.directory.dial_due()
        return self.dialled[:]


def test_member_is_dialled_once_until_the_dial_ends(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.poll() == []
    watched.write("s0", "s0/1/a", model="m", pid=1)
    assert watched.poll() == ["s0/1/a"]
    assert watched.poll(after=100) == []
    watched.directory.on_peer_connected("s0/1/a", "m")
    assert watched.poll(after=100) == []


def test_failed_dials_back_off_exponentially(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write("s0", "s0/1/a")
    watched.poll()
    pauses, pause = [], FIRST_PAUSE
    for _ in range(8):
        watched.directory.on_peer_lost("s0/1/a", "refused")
        assert watched.poll(after=pause * 0.9) == []
        assert watched.poll(after=pause * 0.2) == ["s0/1/a"]
        pauses.append(pause)
        pause = min(2 * pause, MAX_PAUSE)
    assert pauses[-1] == MAX_PAUSE


def test_broken_link_is_redialled_after_the_first_pause(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write("s0", "s0/1/a")
    watched.poll()
    for _ in range(6):
        watched.directory.on_peer_lost("s0/1/a", "refused")
        watched.poll(after=MAX_PAUSE)
    watched.directory.on_peer_connected("s0/1/a", "m")
    watched.directory.on_peer_lost("s0/1/a", "refused")
    assert watched.poll(after=FIRST_PAUSE * 1.1) == ["s0/1/a"]


def test_removed_member_is_not_redialled(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write("s0", "s0/1/a")
    watched.poll()
    (tmp_path / "s0.json").unlink()
    assert watched.poll(after=1) == []
    watched.directory.on_peer_lost("s0/1/a", "refused")
    assert watched.poll(after=10) == []


def test_new_peer_in_the_same_file_is_dialled(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write("s0", "s0/1/a")
    watched.poll()
    watched.write("s0", "s0/2/b")
    assert watched.poll() == ["s0/2/b"]
    watched.directory.on_peer_lost("s0/1/a", "refused")
    assert watched.poll(after=10) == []


def test_invalid_member_files_are_ignored(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    (tmp_path / "half.json").write_text('{"peer": "x')
    (tmp_path / "other.json").write_text('{"peer": 5, "target": "t"}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "huge.json").write_text(" " * 100_000 + "{}")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / ".s1.1.tmp").write_text('{"peer": "x", "target": "t"}')
    (tmp_path / "notes.txt").write_text("hello")
    watched.write("s0", "s0/1/a")
    assert watched.poll() == ["s0/1/a"]
    watched.write("half", "s2/1/c")
    assert watched.poll() == ["s2/1/c"]


def test_folder_created_later_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "later"
    watched = Watched(folder)
    assert watched.poll() == []
    folder.mkdir()
    watched.write("s0", "s0/1/a")
    assert watched.poll() == ["s0/1/a"]


def test_unlinked_server_is_unreachable_until_back_or_removed(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write("s0", "s0/1/a")
    watched.poll()
    assert watched.directory.unreachable_servers("m") == ["s0/1/a"], (
        "nobody knows yet what it serves"
    )
    watched.directory.on_peer_connected("s0/1/a", "m")
    assert watched.directory.unreachable_servers("m") == []
    watched.directory.on_peer_lost("s0/1/a", "broke")
    watched.poll(after=MAX_PAUSE)
    watched.directory.on_peer_lost("s0/1/a", "no answer")
    assert watched.directory.unreachable_servers("m") == ["s0/1/a"]
    assert watched.directory.unreachable_servers("another") == []
    assert watched.directory.may_be_running("s0/1/a") and not watched.directory.may_be_running(
        "s1/1/a"
    )
    watched.directory.on_peer_connected("s0/1/a", "m")
    assert watched.directory.unreachable_servers("m") == []
    assert not watched.directory.may_be_running("s0/1/a"), "it has a link"
    watched.directory.on_peer_lost("s0/1/a", "broke")
    (tmp_path / "s0.json").unlink()
    watched.poll()
    assert watched.directory.unreachable_servers("m") == [], "it left the members"
    assert not watched.directory.may_be_running("s0/1/a")


def test_server_that_never_returns_is_given_up(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write("s0", "s0/1/a")
    watched.write("s1", "s1/1/a")
    watched.poll()
    watched.directory.on_peer_lost("s1/1/a", "it loads")
    watched.directory.on_peer_connected("s0/1/a", "m")
    watched.directory.on_peer_lost("s0/1/a", "broke")
    for _ in range(round(DEAD_SECONDS / MAX_PAUSE)):
        assert watched.directory.unreachable_servers("m") == ["s0/1/a"], (
            "the other one knows nothing"
        )
        watched.poll(after=MAX_PAUSE)
        watched.directory.on_peer_lost("s0/1/a", "no answer")
    watched.poll(after=MAX_PAUSE)
    assert watched.directory.unreachable_servers("m") == []
    assert not watched.directory.may_be_running("s0/1/a")


def test_refused_connection_marks_the_server_as_dead(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.write("s0", "s0/1/a")
    watched.poll()
    watched.directory.on_peer_connected("s0/1/a", "m")
    watched.directory.on_peer_lost("s0/1/a", "broke")
    assert watched.directory.unreachable_servers("m") == ["s0/1/a"]
    watched.poll(after=FIRST_PAUSE)
    watched.directory.on_peer_lost("s0/1/a", "connect: Connection refused (111)")
    assert watched.directory.unreachable_servers("m") == []
    assert not watched.directory.may_be_running("s0/1/a")
