"""Sessions of ONNX Runtime, each in a child process that shares this process's weights without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

import onnx

from rewriter.ir import children
from rewriter.ir.errors import ArithmeticRunError, EngineError, NativeError, RewriterError
from rewriter.ir.graph import label
from rewriter.ir.model import Array, Model, walk_nodes
from rewriter.runtime.engines.local_session import LocalSession
from rewriter.runtime.engines.onnxruntime_library import NoKernelError, import_onnxruntime, learn_versions
from rewriter.runtime.engines.this_machine import obstacle

RUN_S = 600.0
"""Wall time of one run, and of loading a model: the slowest model of `models/` needs seconds."""

GPU_BYTES = 2**25
"""Least weights of a model whose references run on a GPU: a small one is done before CUDA has started."""

_failures: list[str] = []
"""Problem of the first session that CUDA could not open or run here; every later one runs on the CPU."""


def gpu_notes() -> list[str]:
    """One sentence on why references that belong on the GPU ran on the CPU, if they did."""
    return [f"references and ranges were computed on the CPU, since CUDA failed: {f}" for f in _failures]


def runs_on_gpu(model: Model) -> bool:
    """True if a reference of this model runs with CUDA: it is large, and ONNX Runtime and the GPU can."""
    return (
        children.FORKS
        and not children.inside
        and not _failures
        and model.size >= GPU_BYTES
        and obstacle("onnxruntime-cuda") is None
    )


def qualified(node: onnx.NodeProto) -> str:
    """The operator, with its domain in front unless that is the default one."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


class Session:
    """A model, loaded and ready to run. A context manager; `close` frees its memory.

    Takes the arguments `optimize` and `threads` of `LocalSession`, which lives in a child process. Feeds and
    outputs go through a socket.

    Args:
        gpu: Run with CUDA, without TF32, where that works and the model is large (`runs_on_gpu`): for
            references and ranges. What must be bit-equal to another session belongs where that one runs.

    Raises:
        NoKernelError: an operator has no implementation.
        ArithmeticRunError: ONNX Runtime cannot load the model, or its process ended.
    """

    def __init__(
        self, model: Model, *, optimize: bool = False, threads: int | None = None, gpu: bool = False
    ) -> None:
        self._file = str(model.path) if model.path else None
        self._loops = [label(n) for n in walk_nodes(model.proto.graph) if n.op_type in ("Loop", "Scan")]
        ort = import_onnxruntime()  # here, so that each child has it at once
        learn_versions(model.proto)
        self.version = f"onnxruntime {ort.__version__}"
        self._local: LocalSession | None = None
        self._child: children.Child | None = None
        if children.inside or not children.FORKS:
            self._local = LocalSession(model, optimize=optimize, threads=threads)
            self.outputs = self._local.outputs
            return
        self._model, self._optimize, self._threads = model, optimize, threads
        self._gpu = gpu and runs_on_gpu(model)
        try:
            self._start()
        except NoKernelError:
            raise
        except (ArithmeticRunError, EngineError) as error:
            self._leave_gpu(error)
            self._start()

    def _start(self) -> None:
        model, optimize = self._model, self._optimize and not self._gpu
        with self._explained():
            self._child = children.Child(
                lambda: LocalSession(
                    model, optimize=optimize, threads=self._threads, gpu=self._gpu, tf32=False
                ),
                doing="ONNX Runtime on the GPU" if self._gpu else "ONNX Runtime",
                limit_s=RUN_S,
                gpu=self._gpu,
            )
            self.outputs = self._child.call("named")

    def _leave_gpu(self, error: RewriterError) -> None:
        """Go on with the CPU; an error of the CPU is the model's own, and is raised."""
        if not self._gpu:
            raise error
        self.close()
        self._gpu = False
        _failures.append(error.what)

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Values of the outputs, or of those named, by name.

        Args:
            feeds: One array for each input, in its type and shape; BF16 as ml_dtypes.bfloat16.

        Raises:
            ArithmeticRunError: a feed does not fit, or a node failed, which is named.
        """
        if self._local is not None:
            return self._local.run(feeds, outputs)
        if self._child is None:
            raise ArithmeticRunError(
                "the session is closed", where=self._file, hint="make another session of the same model"
            )
        names = None if outputs is None else list(outputs)
        try:
            return self._run(feeds, names)
        except ArithmeticRunError as error:
            self._leave_gpu(error)
            self._start()
        return self._run(feeds, names)

    def _run(self, feeds: Mapping[str, Array], names: list[str] | None) -> dict[str, Array]:
        assert self._child is not None
        with self._explained():
            values: dict[str, Array] = self._child.call("run", dict(feeds), names, limit_s=RUN_S)
        return values

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns the end of the child into the error of a run."""
        try:
            yield
        except NativeError as error:
            loops = f": {', '.join(self._loops[:3])}" if self._loops and error.cause == "timeout" else ""
            raise ArithmeticRunError(error.what + loops, where=self._file, hint=error.hint) from error

    def close(self) -> None:
        """Free the session; the weights stay with the model."""
        for one in (self._local, self._child):
            if one is not None:
                one.close()
        self._local = self._child = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
