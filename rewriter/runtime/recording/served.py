"""Runs a script whose calls of some models are answered by this process: by emulations, or by engines.

    run = serve(command, names, replaced, answer)

The script's processes connect to this one, and send each call. `Served` loads in the script's own
environment, which may lack all but NumPy.
"""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from rewriter.runtime.recording.interception import Feeds, ScriptRun, end_script, run_script

Answer = Callable[[str, Sequence[str], Feeds, "Sequence[Any] | None"], "Sequence[Any] | None"]
"""Gets file, names of outputs, feeds, and the outputs where the script computed them; else returns them."""

STOPPED = 75  # exit code of a script that was stopped at a call (EX_TEMPFAIL)


class StopScript(Exception):
    """Raised by an `Answer` to end the script."""


class Served:
    """The hook in the script's process.

    Args:
        address, key: Of the process that answers; the key as hexadecimal digits.
        names: Of the models, by the SHA-256 of their files.
        replaced: The models that are answered; of others the outputs are sent.
    """

    def __init__(self, address: str, key: str, names: Mapping[str, str], replaced: Sequence[str]) -> None:
        self._address, self._key = address, bytes.fromhex(key)
        self._names, self._replaced = names, frozenset(replaced)
        self._sessions: dict[int, tuple[str, Any]] = {}
        self._connection: Connection | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def load(self, session: Any, model: Any) -> Any:
        content = model if isinstance(model, bytes) else Path(model).read_bytes()
        if name := self._names.get(hashlib.sha256(content).hexdigest()):
            self._sessions[id(session)] = name, session  # kept, so that its id stays its own
        return model

    def call(
        self, session: Any, names: Sequence[str], feeds: Feeds, run: Callable[[], Sequence[Any]]
    ) -> Sequence[Any]:
        name, _ = self._sessions.get(id(session), ("", None))
        if not name:
            return run()
        outputs = None if name in self._replaced else run()
        if self._owner != os.getpid():  # a fork has a connection of its own
            self._connection, self._lock, self._owner = None, threading.Lock(), os.getpid()
        with self._lock:
            answered, result = self._ask((name, list(names), feeds, outputs))
        if not answered:
            end_script(STOPPED)
        return result if outputs is None else outputs

    def _ask(self, message: object) -> Any:
        if self._connection is None:
            self._connection = Client(self._address, authkey=self._key)
        self._connection.send(message)
        try:
            return self._connection.recv()
        except EOFError:
            return False, None

    def finish(self) -> None:
        if self._connection is not None and self._owner == os.getpid():
            self._connection.close()


def serve(
    command: Sequence[str],
    names: Mapping[str, str],
    replaced: Sequence[str],
    answer: Answer,
    limit_s: float | None = None,
) -> ScriptRun:
    """Runs a command whose calls `answer` answers, one at a time; `names` and `replaced` as for `Served`.

    After `limit_s` seconds it is ended, which a script that calls nothing would not notice.

    Raises:
        OSError: the command cannot be started.
        BaseException: what `answer` raised, apart from `StopScript`; the script has been ended.
    """
    key, lock, ended, failures = os.urandom(16), threading.Lock(), threading.Event(), list[BaseException]()

    def talk(connection: Connection) -> None:
        with connection, suppress(EOFError, ConnectionError):
            while True:
                message = connection.recv()
                with lock:
                    try:
                        reply = True, answer(*message)
                    except BaseException as error:  # Ctrl-C comes with a progress report
                        failures.append(error)
                        reply = False, None
                connection.send(reply)

    def accept() -> None:
        with suppress(OSError, EOFError):  # it is closed
            while not ended.is_set():
                threading.Thread(target=talk, args=[listener.accept()], daemon=True).start()

    with Listener(None, authkey=key) as listener:
        threading.Thread(target=accept, daemon=True).start()
        hook = f"{__name__}:{Served.__name__}"
        arguments = {"address": listener.address, "key": key.hex(), "names": dict(names)}
        try:
            arguments |= {"replaced": list(replaced)}
            result = run_script(command, hook, arguments, quiet=True, limit_s=limit_s)
        finally:
            ended.set()
            Client(listener.address, authkey=key).close()  # `accept` waits for one
    with lock:  # an answer to a script that was ended meanwhile is complete
        pass
    if failures and not isinstance(failures[0], StopScript):
        raise failures[0]
    return replace(result, exit_code=STOPPED) if failures else result
