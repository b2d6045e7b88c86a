"""Files and folders that are whole or not there.  Read when another file sends you here.

Writing may be cut short at any moment, by kill -9, a full disk or Ctrl-C.  Hence one rule: write under another name,
then rename, which a file system does at one stroke.
"""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

from etils import epath
from tqdm import tqdm

from config import UserError

try:
    import fcntl
except ImportError:  # Windows: runs are not locked there
    fcntl = None


# A cell's `!python` looks like a terminal, and cannot draw a bar in place.
IN_NOTEBOOK = "JPY_PARENT_PID" in os.environ


def bytes_bar(name: str, total: int, done: int = 0, quiet: bool = False) -> tqdm:
    """A progress bar on a terminal, for what takes longer than a second; in a notebook it moves every ten."""
    look = dict(unit="B", unit_scale=True, delay=1, mininterval=10 if IN_NOTEBOOK else 0.1)
    return tqdm(desc=name, total=total or None, initial=done, disable=quiet or None, **look)


def run_path(out_dir: str | epath.Path) -> epath.Path:
    """Absolute, because Orbax refuses relative paths.  Local or gs://."""
    return epath.Path(out_dir if "://" in str(out_dir) else os.path.abspath(out_dir))


def write_whole(path: epath.Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def remove_whole(path: epath.Path) -> None:
    """Delete a folder; half of one never stands under its name, unless in a bucket, where renaming would be copying."""
    if "://" not in str(path):
        path = path.rename(path.with_name(path.name + ".deleted"))
    path.rmtree()


def move_aside(path: epath.Path, tag: str = "") -> epath.Path:
    """Rename out/tiny to out/tiny.1, or to the first number that is free.  Gives the new path."""
    n = 1
    while (new := path.with_name(f"{path.name}{tag}.{n}")).exists():
        n += 1
    return path.rename(new)


def hold(path: epath.Path) -> int:
    """Lock a folder, made if need be, until the process ends, however it ends, or the descriptor returned is closed.

    UserError if another process has it.  Where there are no locks, as on gs://, nothing is locked.
    """
    path.mkdir(parents=True, exist_ok=True)
    if fcntl is None or "://" in str(path):
        return os.open(os.devnull, os.O_RDONLY)  # something to close
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"another process is training in {path}: let it end, or use another --out_dir") from None
    except OSError:
        pass  # a file system without locks
    return descriptor


@contextmanager
def locked(folder: Path):
    """Only one process, or thread, is within for a folder, which is made if need be; others wait for it to come out.

    Gives whether that is so: there are file systems without locks.  UserError if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / ".lock", "a")  # a file, because NFS locks none that is open for reading only
    except OSError as e:
        raise UserError(f"{folder} cannot be written ({e.strerror}): give another --data_dir") from None
    with lock:
        yield wait_for(lock, folder)


def wait_for(lock, folder: Path) -> bool:
    """Lock an open file, until it is closed.  Gives whether it could be locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for what is being written into {folder}", file=sys.stderr)
        fcntl.flock(lock, fcntl.LOCK_EX)
    except (OSError, AttributeError):  # a file system, or a Windows, without locks
        return False
    return True
