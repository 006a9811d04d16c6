"""Sessions of ONNX Runtime, each in a child process that shares this process's weights without a copy.

    with on_cuda(pays) as notes:
        outputs = Session(model).run(feeds)

Large models run with CUDA, where it works (benchmarks/README.md#references-on-cuda).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial

import onnx

from rewriter.base import sandbox
from rewriter.base.errors import ArithmeticRunError, EngineError, NativeError, RewriterError
from rewriter.ir.graph import display_name
from rewriter.ir.model import Array, Model, walk_nodes
from rewriter.runtime.engines.local_session import LocalSession
from rewriter.runtime.engines.onnxruntime_library import NoKernelError, import_onnxruntime

RUN_S = 600.0
"""Wall time of one run, and of loading a model: the slowest model of `models/` needs seconds."""

_cuda: ContextVar[list[str] | None] = ContextVar("cuda", default=None)
"""None: sessions run on the CPU. Else with CUDA until it fails; the list then has a sentence on that."""


@contextmanager
def on_cuda(pays: bool) -> Iterator[list[str]]:
    """Sessions of the block run with CUDA, without TF32, or on the CPU; between two blocks, bits differ.

    Yields:
        One sentence for the user if CUDA failed, from when on the CPU computes.
    """
    notes = list[str]()
    token = _cuda.set(notes if pays else None)
    try:
        yield notes
    finally:
        _cuda.reset(token)


def began_on_cuda() -> bool:
    """True if sessions here have run with CUDA, whose kernels sum in another order for other shapes."""
    return _cuda.get() is not None


def runs_on_cuda() -> bool:
    """True if the next session here is to run with CUDA."""
    return _cuda.get() == [] and sandbox.FORKS and not sandbox.inside


def qualified(node: onnx.NodeProto) -> str:
    """The operator, with its domain in front unless that is the default one."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


class Session(AbstractContextManager["Session"]):
    """A model, loaded in a child process and ready to run (see `LocalSession`); a context manager.

    Raises:
        NoKernelError: an operator has no implementation.
        ArithmeticRunError: ONNX Runtime cannot load the model, or its process ended.
    """

    def __init__(self, model: Model, *, optimize: bool = False) -> None:
        import_onnxruntime()  # here, so that every forked child has it loaded
        self._model, self._optimize = model, optimize
        self._file = str(model.path) if model.path else None
        self._worker: sandbox.AnyWorker | None = None
        self._gpu = runs_on_cuda()
        try:
            self._open()
        except (ArithmeticRunError, EngineError) as error:
            self._leave_cuda(error)

    def _open(self) -> None:
        model, optimize, gpu = self._model, self._optimize, self._gpu
        with self._explained():
            self._worker = sandbox.worker(
                partial(LocalSession, model, optimize=optimize, gpu=gpu, tf32=False),
                doing="ONNX Runtime with CUDA" if gpu else "ONNX Runtime",
                limit_s=RUN_S,
                limited=not gpu,
            )

    def _leave_cuda(self, error: RewriterError) -> None:
        """Go on with the CPU; an error of the CPU is the model's own, and is raised."""
        if not self._gpu or isinstance(error, NoKernelError):
            raise error
        self.close()
        self._gpu = False
        self._open()
        notes = _cuda.get()
        if notes is not None and not notes:
            hint = f"; {error.hint}" if isinstance(error, EngineError) else ""
            notes.append(f"references and ranges come from the CPU, since CUDA failed: {error.what}{hint}")

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Values of the outputs, or of those named, by name.

        Args:
            feeds: One array for each input, in its type and shape; BF16 as ml_dtypes.bfloat16.

        Raises:
            ArithmeticRunError: a feed does not fit, or a node failed, which is named.
        """
        try:
            return self._run(feeds, outputs)
        except ArithmeticRunError as error:
            self._leave_cuda(error)
        return self._run(feeds, outputs)

    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> dict[str, Array]:
        if self._worker is None:
            raise ArithmeticRunError(
                "the session is closed", where=self._file, hint="make another session of the same model"
            )
        with self._explained():
            values: dict[str, Array] = self._worker.call("run", dict(feeds), outputs, limit_s=RUN_S)
        return values

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns the end of the child into the error of a run."""
        try:
            yield
        except NativeError as error:
            nodes = walk_nodes(self._model.proto.graph) if error.cause == "timeout" else ()
            loops = [display_name(node) for node in nodes if node.op_type in ("Loop", "Scan")][:3]
            what = error.what + (f": {', '.join(loops)}" if loops else "")
            raise ArithmeticRunError(what, where=self._file, hint=error.hint) from error

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def __exit__(self, *_: object) -> None:
        self.close()
