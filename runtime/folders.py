"""Private folders that vanish with their owner, however it went.

The owner holds a lock on a file in the folder. The system drops the lock when the process ends, `kill -9` included, so
a folder whose lock is free has no owner and is swept by whoever starts next.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from .errors import Refused

try:
    import fcntl
except ImportError:  # Windows has no such lock: folders are removed by a normal end alone
    fcntl = None  # type: ignore[assignment]

SHARED_MEMORY = Path("/dev/shm")
UNLOCKED_SECONDS = 60.0
"""A folder without a lock file is left alone so long: its owner may be about to lock it."""

_PREFIX = f"outrigger-{os.getuid() if hasattr(os, 'getuid') else 0}-"


class PrivateFolder:
    """A new folder of mode 0700 under `base`, owned by this process until `remove`.

    Raises `Refused` when the folder cannot be made.
    """

    def __init__(self, base: Path) -> None:
        sweep(base)
        self.path = base / f"{_PREFIX}{secrets.token_hex(4)}"
        try:
            self.path.mkdir(mode=0o700)
            self._lock = _lock_new(self.path)
        except OSError as error:
            other = "" if base == SHARED_MEMORY else ", or name another in TMPDIR"
            raise Refused(
                f"cannot make the private folder {self.path}: {error.strerror}; "
                f"make {base} writable, with room in it{other}"
            ) from error

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *raised: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Delete the folder with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def temporary_base() -> Path:
    """Where sockets and meeting files go."""
    return Path(tempfile.gettempdir())


def sweep(base: Path) -> None:
    """Remove the folders under `base` whose owner is gone."""
    for path in base.glob(f"{_PREFIX}*") if fcntl else ():
        try:
            if _abandoned(path):
                shutil.rmtree(path, ignore_errors=True)
        except OSError:
            continue  # gone meanwhile, or not ours


def sweep_all() -> None:
    """Remove every folder of ours on this machine whose owner is gone."""
    sweep(temporary_base())
    sweep(SHARED_MEMORY)


def _lock_new(folder: Path) -> int | None:
    if fcntl is None:
        return None
    unlocked = folder / "unlocked"
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        descriptor = os.open(unlocked, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        undo.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unlocked.rename(folder / "lock")  # locked before it can be seen under this name
        undo.pop_all()
    return descriptor


def _abandoned(folder: Path) -> bool:
    status = folder.lstat()
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return time.time() - status.st_mtime > UNLOCKED_SECONDS
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def shared_folder(name: str) -> Path | None:
    """The sidecar's folder of shared memory of that name; None when there is none, or it is not a folder of ours.

    `name` comes over the wire, checked there to be a plain file name.
    """
    path = SHARED_MEMORY / name
    if not name.startswith(_PREFIX) or path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.getuid():
        return None
    return path
