"""Sessions of ONNX Runtime, each in a child process that shares this process's weights without a copy.

They compute references and ranges on the CPU: CUDA took longer (benchmarks/README.md#references-on-cuda).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import onnx

from rewriter.ir import children
from rewriter.ir.errors import ArithmeticRunError, NativeError
from rewriter.ir.graph import label
from rewriter.ir.model import Array, Model, walk_nodes
from rewriter.runtime.engines.local_session import LocalSession
from rewriter.runtime.engines.onnxruntime_library import import_onnxruntime

RUN_S = 600.0
"""Wall time of one run, and of loading a model: the slowest model of `models/` needs seconds."""


def qualified(node: onnx.NodeProto) -> str:
    """The operator, with its domain in front unless that is the default one."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


class Session(AbstractContextManager["Session"]):
    """A model, loaded and ready to run; feeds and outputs go through a socket. A context manager.

    Args:
        optimize: As for `LocalSession`, which lives in a child process.

    Raises:
        NoKernelError: an operator has no implementation.
        ArithmeticRunError: ONNX Runtime cannot load the model, or its process ended.
    """

    def __init__(self, model: Model, *, optimize: bool = False) -> None:
        import_onnxruntime()  # here, so that each child has it at once
        self._model = model
        self._file = str(model.path) if model.path else None
        self._held: children.Held | None = None
        with self._explained():
            self._held = children.held(
                lambda: LocalSession(model, optimize=optimize), doing="ONNX Runtime", limit_s=RUN_S
            )

    def run(self, feeds: Mapping[str, Array], outputs: Sequence[str] | None = None) -> dict[str, Array]:
        """Values of the outputs, or of those named, by name.

        Args:
            feeds: One array for each input, in its type and shape; BF16 as ml_dtypes.bfloat16.

        Raises:
            ArithmeticRunError: a feed does not fit, or a node failed, which is named.
        """
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

    def __exit__(self, *_: object) -> None:
        self.close()
