"""Sessions of ONNX Runtime, each in a child process that shares this process's weights without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import onnx

from rewriter.ir import children
from rewriter.ir.errors import ArithmeticRunError, EngineError, NativeError, RewriterError
from rewriter.ir.graph import label
from rewriter.ir.model import Array, Model, walk_nodes
from rewriter.runtime.engines.local_session import LocalSession
from rewriter.runtime.engines.onnxruntime_library import NoKernelError, import_onnxruntime
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
    """A model, loaded and ready to run; feeds and outputs go through a socket. A context manager.

    Args:
        optimize: As for `LocalSession`, which lives in a child process.
        gpu: Run with CUDA, without TF32, where that works and the model is large (`runs_on_gpu`): for
            references and ranges. What must be bit-equal to another session belongs where that one runs.

    Raises:
        NoKernelError: an operator has no implementation.
        ArithmeticRunError: ONNX Runtime cannot load the model, or its process ended.
    """

    def __init__(self, model: Model, *, optimize: bool = False, gpu: bool = False) -> None:
        import_onnxruntime()  # here, so that each child has it at once
        self._model, self._optimize = model, optimize
        self._file = str(model.path) if model.path else None
        self._held: children.Held | None = None
        self._gpu = gpu and runs_on_gpu(model)
        try:
            self._start()
        except (ArithmeticRunError, EngineError) as error:
            self._leave_gpu(error)

    def _start(self) -> None:
        model, gpu = self._model, self._gpu
        with self._explained():
            self._held = children.held(
                lambda: LocalSession(model, optimize=self._optimize and not gpu, gpu=gpu, tf32=False),
                doing="ONNX Runtime on the GPU" if gpu else "ONNX Runtime",
                limit_s=RUN_S,
                gpu=gpu,
            )

    def _leave_gpu(self, error: RewriterError) -> None:
        """Go on with the CPU; an error of the CPU is the model's own, and is raised."""
        if not self._gpu or isinstance(error, NoKernelError):
            raise error
        self.close()
        self._gpu = False
        _failures.append(error.what)
        self._start()

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
            self._leave_gpu(error)
        return self._run(feeds, outputs)

    def _run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None) -> dict[str, Array]:
        if self._held is None:
            raise ArithmeticRunError(
                "the session is closed", where=self._file, hint="make another session of the same model"
            )
        with self._explained():
            values: dict[str, Array] = self._held.call("run", dict(feeds), outputs, limit_s=RUN_S)
        return values

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns the end of the child into the error of a run."""
        try:
            yield
        except NativeError as error:
            nodes = walk_nodes(self._model.proto.graph) if error.cause == "timeout" else ()
            loops = [label(node) for node in nodes if node.op_type in ("Loop", "Scan")][:3]
            what = error.what + (f": {', '.join(loops)}" if loops else "")
            raise ArithmeticRunError(what, where=self._file, hint=error.hint) from error

    def close(self) -> None:
        """Free the session; the weights stay with the model."""
        if self._held is not None:
            self._held.close()
            self._held = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
