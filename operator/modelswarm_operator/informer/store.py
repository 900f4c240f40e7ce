"""All known objects of one kind: the resourceVersion decides which is newer, a list confirms deletions.

Used by `cache`, once per kind. Nothing here waits or does I/O, and it knows no kind by name.

The higher resourceVersion of an object wins. A list replaces everything that it is newer than: objects deleted without
an event vanish, and objects created without one appear. Changes by events after the list stay. A deleted object leaves
its last version behind until a list confirms the deletion, so an older list brings nothing back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from modelswarm_operator.reconcile.state.observed import Json

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Entry(Generic[V]):
    version: int
    owner: str  # uid of the swarm it belongs to
    view: V


@dataclass(frozen=True, slots=True)
class Change(Generic[V]):
    owner: str
    before: V | None
    after: V | None


class Store(Generic[V]):
    """The objects of one kind by uid and by owner. Objects without an owner are not ours and are dropped."""

    def __init__(self, view_of: Callable[[Json], V], owner_of: Callable[[Json], str]) -> None:
        self._view_of = view_of
        self._owner_of = owner_of
        self._entries: dict[str, Entry[V]] = {}
        self._by_owner: dict[str, dict[str, Entry[V]]] = {}
        self._deleted_versions: dict[
            str, int
        ] = {}  # uid: last version of objects that an event reported as deleted
        self._listed_version = 0

    def upsert(self, raw: Json) -> Change[V] | None:
        """Store an object of an event, a response or a list. Returns None if nothing changed."""
        uid, version = raw["metadata"]["uid"], int(raw["metadata"]["resourceVersion"])
        known = self._entries.get(uid)
        if version <= self._deleted_versions.get(uid, -1) or (
            known is not None and version <= known.version
        ):
            return None
        owner = self._owner_of(raw)
        if not owner:
            return self.delete(uid, version)
        self._remove_entry(uid)
        entry = Entry(version, owner, self._view_of(raw))
        self._entries[uid] = self._by_owner.setdefault(owner, {})[uid] = entry
        self._deleted_versions.pop(uid, None)
        before = known.view if known is not None else None
        return None if before == entry.view else Change(owner, before, entry.view)

    def delete(self, uid: str, version: int) -> Change[V] | None:
        """Remove an object that is deleted (or no longer ours) as of `version`."""
        known = self._entries.get(uid)
        if known is not None and known.version > version:
            return None  # a later version was seen
        self._deleted_versions[uid] = version
        self._remove_entry(uid)
        return Change(known.owner, known.view, None) if known is not None else None

    def forget(self, uid: str) -> Change[V] | None:
        """Remove an object whatever its last version is."""
        known = self._entries.get(uid)
        return self.delete(uid, known.version) if known is not None else None

    def _remove_entry(self, uid: str) -> None:
        entry = self._entries.pop(uid, None)
        if entry is not None:
            siblings = self._by_owner[entry.owner]
            del siblings[uid]
            if not siblings:
                del self._by_owner[entry.owner]

    def replace(self, items: Sequence[Json], listed: int, owner: str = "") -> list[Change[V]]:
        """Replace all objects, or those of one owner, by the list as of version `listed`."""
        changes: list[Change[V] | None] = []
        if not owner:
            if listed < self._listed_version:
                changes += self._clear()  # etcd was restored: old versions mean nothing any more
            self._listed_version = listed
        changes += [self.upsert(raw) for raw in items]
        present = {raw["metadata"]["uid"] for raw in items}
        scope = self._by_owner.get(owner, {}) if owner else self._entries
        missing = [uid for uid in scope if uid not in present]
        changes += [self.delete(uid, listed) for uid in missing]
        if not owner:
            self._deleted_versions = {
                uid: seen for uid, seen in self._deleted_versions.items() if seen > listed
            }
        return [change for change in changes if change is not None]

    def _clear(self) -> list[Change[V]]:
        entries = list(self._entries.values())
        self._entries, self._by_owner, self._deleted_versions = {}, {}, {}
        return [Change(entry.owner, entry.view, None) for entry in entries]

    def objects_of(self, owner: str) -> list[V]:
        return [entry.view for entry in self._by_owner.get(owner, {}).values()]

    def get(self, uid: str) -> V | None:
        entry = self._entries.get(uid)
        return entry.view if entry is not None else None

    def all(self) -> list[V]:
        return [entry.view for entry in self._entries.values()]

    def __len__(self) -> int:
        return len(self._entries)
