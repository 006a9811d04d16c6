"""Output files: regular files are replaced as a whole, devices and pipes are written to."""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

STREAMS = {"/dev/stdout": 1, "/proc/self/fd/1": 1, "/dev/fd/1": 1}
STREAMS |= {"/dev/stderr": 2, "/proc/self/fd/2": 2, "/dev/fd/2": 2}
"""Names of standard output and error: by name, a file that the shell sends them to would start over."""


def special(path: Path) -> str:
    """The kind of a file that is not replaced: `a device`, `a pipe`; "" for others.

    Standard output and error are devices, even if the shell sends them to a file.
    """
    mode = 0
    with suppress(OSError):
        mode = path.stat().st_mode
    if str(path) in STREAMS or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        return "a device"
    return "a pipe" if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else ""


def write_special(path: Path, content: bytes) -> None:
    """Writes to a device or a pipe.

    Raises:
        OSError: it cannot be written, or it is a disk or a socket.
    """
    number = STREAMS.get(str(path))
    if number is None and path.is_block_device():
        raise OSError(errno.EINVAL, "it is a disk")
    if number is not None:
        (sys.stdout if number == 1 else sys.stderr).flush()  # what was printed before comes first
    # a duplicate continues at the position of the open file
    handle = os.open(path, os.O_WRONLY) if number is None else os.dup(number)
    with os.fdopen(handle, "wb") as stream:
        stream.write(content)


def file_to_replace(path: Path) -> Path:
    """The regular file that a result replaces or creates: the target of a symbolic link, if it is one.

    Raises:
        OSError: it is a device or a pipe, or links form a circle.
    """
    if kind := special(path):
        raise OSError(errno.EINVAL, f"it is {kind}, and no file that can be replaced")
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


SAMPLES = (".npz", ".npy")
"""Files of a folder of samples, which may hold reports, too."""


def overwrites(output: Path, other: Path) -> bool:
    """True if an output is another file, one of its data files, or a sample of it if it is a folder."""
    if special(output):
        return False
    if output.resolve() == other.resolve():
        return True
    if not (output.exists() and other.exists()):
        return False
    if other.is_dir():
        return output.suffix.lower() in SAMPLES and output.resolve().is_relative_to(other.resolve())
    return output.samefile(other)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields a temporary file beside `target`, which replaces it if the block succeeds.

    The new file has the permissions of the old one, and its owner where the system allows that.
    """
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        take_permissions(temporary, target)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def take_permissions(new: Path, old: Path) -> None:
    """Gives a file the owner and the mode of another; those of any new file if the other does not exist."""
    try:
        status = old.stat()
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        new.chmod(0o666 & ~umask)  # mkstemp makes private files
        return
    if hasattr(os, "chown"):
        with suppress(PermissionError):
            os.chown(new, status.st_uid, status.st_gid)
    new.chmod(stat.S_IMODE(status.st_mode))
