"""Output files: regular files are replaced as a whole, devices and pipes are written to.

What is being written is locked until it is complete. The system drops a lock with its process: so the next
run can tell what a killed one left from what a living one writes, on network file systems with locks, too.
"""

import errno
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import IO

STREAMS = {"/dev/stdout": 1, "/proc/self/fd/1": 1, "/dev/fd/1": 1}
STREAMS |= {"/dev/stderr": 2, "/proc/self/fd/2": 2, "/dev/fd/2": 2}
"""Names of standard output and error: by name, a file that the shell sends them to would start over."""


def special(path: Path) -> str:
    """Returns `a device`, such as standard output, or `a pipe` for what is not replaced; "" for others."""
    mode = 0
    with suppress(OSError):
        mode = path.stat().st_mode
    if str(path) in STREAMS or stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        return "a device"
    return "a pipe" if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else ""


def write_special(path: Path, content: bytes) -> None:
    """Writes to a device or a pipe; an OSError for a disk, a socket, or what cannot be written."""
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
    """The regular file that a result replaces, where a symbolic link leads; an OSError if it is none."""
    if kind := special(path):
        raise OSError(errno.EINVAL, f"it is {kind}, and no file that can be replaced")
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    return target


SAMPLES = (".npz", ".npy")  # files of a folder of samples, which may hold reports, too


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


LONG = 200  # bytes of a name, of 255 that are allowed, which the name of a temporary file does not repeat


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yields a temporary file beside `target`, which replaces it if the block succeeds.

    The new file has the permissions of the old one, and its owner where the system allows that. Temporary
    files for `target` that a killed run left are removed.
    """
    name = os.fsencode(target.name)
    short = target.name if len(name) < LONG else sha256(name).hexdigest()
    names = (target.with_name(f".{short}.{secrets.token_hex(4)}.rewriter") for _ in count())
    with reserved(names) as temporary:
        try:
            yield temporary
            take_permissions(temporary, target)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    for left in files_matching(target.parent, re.escape(f".{short}.") + r"[0-9a-f]{8}\.rewriter"):
        with suppress(OSError), abandoned(left) as free:
            if free:
                left.unlink()


@contextmanager
def reserved(names: Iterable[Path], start: bytes = b"") -> Iterator[Path]:
    """Yields the first free name, as a private file with this start, which is locked until the block ends."""
    path, holder = next(filter(None, (_created(name, start) for name in names)))
    with holder:
        if sys.platform == "win32":
            holder.close()  # an open file cannot be replaced there
        yield path


def _created(path: Path, start: bytes) -> tuple[Path, IO[bytes]] | None:
    """The new file, open and locked; None if the name is taken."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return None
    os.write(descriptor, start)  # before anything else: it identifies the file if this run is killed
    holder = os.fdopen(descriptor, "wb")
    try:
        ours = _lock(holder) and os.path.samestat(os.fstat(holder.fileno()), path.stat())
    except FileNotFoundError:  # removed before it was locked, as data of a killed run
        ours = False
    except OSError:  # a file system without locks: nothing is removed there
        ours = True
    if not ours:
        holder.close()
    return (path, holder) if ours else None


@contextmanager
def abandoned(path: Path) -> Iterator[bool]:
    """Yields True if no process has locked a file; it is locked until the block ends."""
    with ExitStack() as stack:
        free = False
        with suppress(OSError):  # network file systems lock only what is open for writing
            mode = "r+b" if os.access(path, os.W_OK) else "rb"
            free = not path.is_symlink() and _lock(stack.enter_context(path.open(mode)))
        yield free


def _lock(stream: IO[bytes]) -> bool:
    """Locks a file until it is closed; False if another process did, an OSError where there are no locks."""
    if sys.platform == "win32":
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
    import fcntl

    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def files_matching(folder: Path, pattern: str) -> list[Path]:
    """The files of a folder whose whole name matches a regular expression."""
    with suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if entry.is_file()]
        return [folder / name for name in sorted(names) if re.fullmatch(pattern, name)]
    return []


OWNER = ".owner"  # file of a work folder that its run has locked, before it gets this name


@contextmanager
def work_folder(parent: Path | None = None, prefix: str = "rewriter-") -> Iterator[Path]:
    """Yields a temporary folder, removed after the block; those that killed runs left are removed before.

    Raises:
        OSError: no folder can be made in `parent`, by default the system's for temporary files.
    """
    for owner in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*/{OWNER}"):
        with suppress(OSError), abandoned(owner) as free:
            if free:
                shutil.rmtree(owner.parent)
    folder = tempfile.TemporaryDirectory(prefix=prefix, dir=parent)
    with folder as name, reserved([Path(name, "new")]) as owner:
        owner.rename(owner.with_name(OWNER))
        yield Path(name)


def take_permissions(new: Path, old: Path) -> None:
    """Gives a file the owner and the mode of another, or a new file's if the other does not exist."""
    try:
        status = old.stat()
    except FileNotFoundError:
        new.chmod(0o666 & ~_umask())  # it was made private
        return
    if hasattr(os, "chown"):
        with suppress(PermissionError):
            os.chown(new, status.st_uid, status.st_gid)
    new.chmod(stat.S_IMODE(status.st_mode))


def _umask() -> int:
    """This process's umask. Setting it to read it would affect files that other threads create."""
    with suppress(OSError):
        if line := re.search(r"^Umask:\s*(\d+)", Path("/proc/self/status").read_text("ascii"), re.MULTILINE):
            return int(line[1], 8)
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
