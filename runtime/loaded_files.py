"""Files that something was read from, as they were then, and whether they still are that.

What tells is number, size and times of change of a file, as `stat` gives them: no content is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from .errors import Refused

NAMED = 3
"""So many changed files are named."""


class FileState(NamedTuple):
    """What is asked of a file: which one it is, its bytes, when it was written to last, which a copy may set back (`cp -p`),
    and when the system noted anything of it, new rights and links too.
    """

    device: int
    inode: int
    nbytes: int
    changed_ns: int
    noted_ns: int

    @classmethod
    def of(cls, file: str | os.PathLike | int) -> FileState:
        """Of a path, or of an open file by its number. Raises `OSError`."""
        status = os.stat(file)
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def is_same_file(self, other: FileState) -> bool:
        """Whether both are of one file, whatever is in it."""
        return self[:2] == other[:2]

    def is_written(self, before: FileState) -> bool:
        """Whether it says itself that it has been written to; new rights or links do not end a run."""
        return self[2:4] != before[2:4]


@dataclass(frozen=True)
class LoadedFiles:
    """Paths, and what was there; None where nothing could be found."""

    states: tuple[tuple[str, FileState | None], ...] = ()

    @classmethod
    def of(cls, places: Iterable[str | os.PathLike]) -> LoadedFiles:
        """These files now; of a folder the files in it and in its folders."""
        paths = sorted({path for place in places for path in _files_in(os.fspath(place))})
        return cls(tuple((path, _state(path)) for path in paths))

    @property
    def changed(self) -> str:
        """Which of them are not what they were, in words: written to, replaced by another, or gone. Empty for none."""
        return _named(f"{path} {_difference(was, now)}" for path, was, now in self._now() if now != was)

    @property
    def overwritten(self) -> str:
        """The same of those alone that were written to where they are. One that was replaced is still there, as it was, for
        whoever has it open.
        """
        return _named(
            f"{path} {_difference(was, now)}"
            for path, was, now in self._now()
            if was and now and now.is_same_file(was) and now.is_written(was)
        )

    def check(self) -> Refused | None:
        """What to end a run with that reads from them; None where it may go on."""
        words = self.overwritten
        return Refused(f"{words}, while the model ran from it: {AGAIN}") if words else None

    def check_read(self) -> Refused | None:
        """What to end with where they were being read until now; None where all is read from the same files."""
        words = self.changed
        return Refused(f"{words}, while it was being read: {AGAIN}") if words else None

    def _now(self) -> Iterator[tuple[str, FileState | None, FileState | None]]:
        return ((path, was, _state(path)) for path, was in self.states)


AGAIN = "queue the prompt again once the file is complete; it is then read anew"


def _named(differences: Iterable[str]) -> str:
    found = list(differences)
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return "; ".join(found[:NAMED]) + more


def _difference(was: FileState | None, now: FileState | None) -> str:
    if now is None:
        return "cannot be found any more"
    if was is None or not now.is_same_file(was):
        return "has been replaced by another file"
    if now.nbytes != was.nbytes:
        return f"has been written to (it had {was.nbytes} bytes and has {now.nbytes})"
    return "has been written to" if now.is_written(was) else "has been changed, though its time of writing is the same"


def _state(path: str) -> FileState | None:
    with suppress(OSError):
        return FileState.of(path)
    return None


def _files_in(place: str) -> Iterator[str]:
    if not os.path.isdir(place):
        yield place
        return
    for folder in (place, *_folders_in(place)):
        with os.scandir(folder) as entries:
            yield from (entry.path for entry in entries if entry.is_file())


def _folders_in(place: str) -> list[str]:
    with os.scandir(place) as entries:
        return [entry.path for entry in entries if entry.is_dir()]
