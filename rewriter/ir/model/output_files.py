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

DESCRIPTORS = (Path("/dev/fd"), Path("/proc/self/fd"))
"""Folders whose entries are open files of this process; /dev/stdout is a link into one of them."""

LINKS = 40
"""Most symbolic links in a row, as Linux follows them (path_resolution(7))."""

KINDS = (
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a disk"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def special(path: Path) -> str:
    """The kind of a file that is not replaced: `a device`, `a disk`, `a pipe`, `a socket`; "" for others.

    Standard output and error are devices, even if the shell sends them to a file.
    """
    if _descriptor(path) is not None:
        return "a device"
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return next((kind for test, kind in KINDS if test(mode)), "")


def write_special(path: Path, content: bytes) -> None:
    """Writes to a device or a pipe.

    Raises:
        OSError: it cannot be written, or it is a disk or a socket.
    """
    if special(path) in ("a disk", "a socket"):
        raise OSError(errno.EINVAL, f"it is {special(path)}")
    number = _descriptor(path)
    if number in (1, 2):
        (sys.stdout if number == 1 else sys.stderr).flush()  # what was printed before comes first
    # a duplicate continues at the position of the open file; opened by name, it would start over
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


def _descriptor(path: Path) -> int | None:
    """The number of the open file that a path such as /dev/stdout names."""
    for _ in range(LINKS):
        if path.parent in DESCRIPTORS and path.name.isdigit():
            return int(path.name)
        if not path.is_symlink():
            return None
        path = Path(os.path.normpath(path.parent / path.readlink()))
    return None
