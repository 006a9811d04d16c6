"""Sessions of ONNX Runtime, each in a child process that shares this process's weights without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType

import onnx

from rewriter.ir import children
from rewriter.ir.errors import ArithmeticRunError, NativeError
from rewriter.ir.graph import label
from rewriter.ir.model import Array, Model, walk_nodes
from rewriter.runtime.engines.local_session import LocalSession
from rewriter.runtime.engines.onnxruntime_copies import learn_versions
from rewriter.runtime.engines.onnxruntime_library import import_onnxruntime
from rewriter.runtime.engines.parts import PartedSession, opened

RUN_S = 600.0
"""Wall time of one run, and of loading a model: the slowest model of `models/` needs seconds."""


def qualified(node: onnx.NodeProto) -> str:
    """The operator, with its domain in front unless that is the default one."""
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"


class Session:
    """A model, loaded and ready to run on the CPU. A context manager; `close` frees its memory.

    Takes the arguments `optimize` and `threads` of `LocalSession`, which lives in a child process, or several
    of which do, for parts of a large model. Feeds and outputs go through shared memory.

    Raises:
        NoKernelError: an operator has no implementation.
        ArithmeticRunError: ONNX Runtime cannot load the model, or its process ended.
    """

    def __init__(self, model: Model, *, optimize: bool = False, threads: int | None = None) -> None:
        self._file = str(model.path) if model.path else None
        self._loops = [label(n) for n in walk_nodes(model.proto.graph) if n.op_type in ("Loop", "Scan")]
        ort = import_onnxruntime()  # here, so that each child has it at once
        learn_versions(model.proto)
        self.version = f"onnxruntime {ort.__version__}"
        self._local: LocalSession | PartedSession | None = None
        self._child: children.Child | None = None
        if children.inside or not children.FORKS:
            self._local = opened(model, optimize=optimize, threads=threads)
            self.outputs = self._local.outputs
            return
        with self._explained():
            self._child = children.Child(
                lambda: opened(model, optimize=optimize, threads=threads),
                doing="ONNX Runtime",
                limit_s=RUN_S,
            )
            self.outputs = self._child.call("named")

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
