"""`record`: runs a script, and keeps what its models were called with."""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from rewriter.base.errors import OutputError, UsageError
from rewriter.base.text import command_line, count
from rewriter.ir.model.output_files import work_folder
from rewriter.runtime.recording.interception import hooked, run_script
from rewriter.runtime.recording.record import RECORD, STOPPED, Recording

RECORDER = "rewriter.runtime.recording.recorder:Recorder"
"""The hook; its NumPy loads only where a script runs."""

GIB = 2**30
DISK_GIB = 4.0  # most that the samples may take on disk

UNSEEN = (
    "calls from Python are recorded (onnxruntime.InferenceSession), and none from C++ (onnxruntime-genai, "
    "Triton): such a program has to save its samples itself. `python -I` and `-E` ignore the recorder: use "
    "`with rewriter.record(FOLDER):` there"
)


def record_script(
    folder: str | os.PathLike[str], command: Sequence[str], *, calls: int = 0, disk_gib: float = DISK_GIB
) -> Recording:
    """Runs a script, and records the models that it calls with ONNX Runtime.

    What it prints passes through, and its results do not change.

    Args:
        folder: Takes the recording; an earlier recording is replaced.
        command: The command line, such as `["python", "my_script.py"]`.
        calls: End the script after so many calls; 0: at its own end.
        disk_gib: Most GiB of samples.

    Raises:
        UsageError: the folder holds something else, the command cannot be started, or no call was seen.
        OutputError: the folder cannot be made.
    """
    with _replacing(Path(folder)) as work:
        arguments = {"folder": str(work), "calls": calls, "most_bytes": disk_gib * GIB, "stop": True}
        try:
            run = run_script(command, RECORDER, arguments)
        except OSError as error:
            what = f"it cannot be started: {error.strerror}"
            raise UsageError(what, where=command[0], hint="write it as on the command line") from error
        exit_code = 0 if (work / STOPPED).exists() else run.exit_code
        recording = replace(
            _collected(work), command=tuple(command), printed=run.printed, exit_code=exit_code
        )
        if recording.calls:
            recording.write(work)
        elif not exit_code:
            raise UsageError("it called no model", where=command_line(command), hint=UNSEEN)
    return recording


@contextmanager
def record(folder: str | os.PathLike[str], *, calls: int = 0, disk_gib: float = DISK_GIB) -> Iterator[None]:
    """Records the models that the code of the block calls with ONNX Runtime, in this process.

    Args:
        folder, disk_gib: As for `record_script`.
        calls: Record so many calls; 0: all.

    Raises:
        UsageError: the folder holds something else, or no call was seen.
    """
    from rewriter.runtime.recording.recorder import Recorder

    with _replacing(Path(folder)) as work:
        with hooked(Recorder(str(work), calls, disk_gib * GIB)):
            yield
        if not _collected(work).calls:
            raise UsageError("no model was called", where="rewriter.record", hint=UNSEEN)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A folder beside another, which it replaces after the block."""
    if folder.exists() and not (folder / RECORD).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError("it holds other files than a recording", where=str(folder), hint="name a new folder")
    folder = folder.resolve()
    with ExitStack() as stack:
        with _errors_name(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            work = stack.enter_context(work_folder(folder.parent, ".recording-")) / folder.name
            work.mkdir()
        yield work
        if (work / RECORD).is_file():
            shutil.rmtree(folder, ignore_errors=True)
            with _errors_name(folder):  # another run may have come first
                work.rename(folder)


@contextmanager
def _errors_name(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"no folder can be made there: {error.strerror}", where=str(folder), hint="name another folder"
        ) from error


def _collected(work: Path) -> Recording:
    """The recording of the process with the most calls, moved up into the folder of all."""
    recordings = {path.parent: Recording.read(path.parent) for path in work.glob(f"*/{RECORD}")}
    if not recordings:
        return Recording((), (), (), (), (), "", 0, {})
    folder, recording = max(recordings.items(), key=lambda item: len(item[1].calls))
    for other in {*work.glob("*/")} - {folder}:
        shutil.rmtree(other)
    for path in folder.iterdir():
        path.rename(work / path.name)
    folder.rmdir()
    (work / STOPPED).unlink(missing_ok=True)
    if others := len(recordings) - 1:
        more = f"{count(others, 'other process')} called models, too"
        recording = replace(recording, notes=(*recording.notes, f"{more}: their calls were not kept"))
        recording.write(work)
    return recording
