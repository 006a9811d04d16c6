"""`rewriter.hooks.torch.patched`: this block, this thread, and PyTorch as it was afterwards."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rewriter.ir.model import load

hooked = pytest.importorskip("hooked", reason="PyTorch is not installed: pip install '.[hooks]'")
from hooked import QUICK, fixed, image, net, newer, torch  # noqa: E402

import rewriter.hooks.torch as hooks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def unpatched() -> Iterator[Any]:
    """PyTorch's exporter, which has to be there again after the test."""
    original = torch.onnx.export
    yield original
    assert torch.onnx.export is original


def users_export(path: Path) -> None:
    torch.onnx.export(net(), (image(),), str(path), dynamo=False)


class TestPatched:
    def test_only_the_block_is_affected(self, unpatched: Any, tmp_path: Path) -> None:
        with hooks.patched(preset="trt-bf16", fix=QUICK) as exports:
            users_export(tmp_path / "in.onnx")
        users_export(tmp_path / "after.onnx")
        assert [exported.path for exported in exports] == [tmp_path / "in.onnx"]
        assert exports[0].result is not None
        assert exports[0].result.plan is not None
        assert exports[0].result.plan.precision == "bf16"
        assert not [n for n in load(tmp_path / "after.onnx").proto.graph.node if n.op_type == "Cast"]

    def test_a_decorator(self, unpatched: Any, tmp_path: Path) -> None:
        decorated = hooks.patched(fix=QUICK)(users_export)
        for name in ("first.onnx", "second.onnx"):
            decorated(tmp_path / name)
            assert any(n.op_type == "Cast" for n in load(tmp_path / name).proto.graph.node)

    def test_an_error_in_the_block_restores(self, unpatched: Any) -> None:
        def interrupted() -> None:
            with hooks.patched():
                assert torch.onnx.export is not unpatched
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            interrupted()

    def test_nested_blocks(self, unpatched: Any, tmp_path: Path) -> None:
        with hooks.patched(fix=QUICK) as outer:
            with hooks.patched(fix=QUICK) as inner:
                users_export(tmp_path / "inner.onnx")
            users_export(tmp_path / "outer.onnx")
        assert [e.path and e.path.name for e in (*inner, *outer)] == ["inner.onnx", "outer.onnx"]

    def test_another_thread_exports_plainly(self, unpatched: Any, tmp_path: Path) -> None:
        thread = threading.Thread(target=users_export, args=(tmp_path / "thread.onnx",))
        with hooks.patched(fix=QUICK) as exports:
            thread.start()
            thread.join()
        assert exports == []
        assert not [n for n in load(tmp_path / "thread.onnx").proto.graph.node if n.op_type == "Cast"]

    def test_two_threads_that_overlap(self, unpatched: Any) -> None:
        inside, leave = threading.Event(), threading.Event()

        def other() -> None:
            with hooks.patched():
                inside.set()
                leave.wait(10)

        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(10)
        with hooks.patched():
            pass
        assert torch.onnx.export is not unpatched
        leave.set()
        thread.join()

    def test_another_replacement_of_the_function_is_kept(self) -> None:
        original = torch.onnx.export
        try:
            with hooks.patched():
                theirs = torch.onnx.export = lambda *args, **kwargs: None
            assert torch.onnx.export is theirs
        finally:
            torch.onnx.export = original

    def test_the_signature_is_unchanged(self, unpatched: Any) -> None:
        with hooks.patched():
            assert inspect.signature(torch.onnx.export) == inspect.signature(unpatched)

    def test_export_inside_fixes_once(self, unpatched: Any, tmp_path: Path) -> None:
        with hooks.patched(fix=QUICK) as exports:
            fixed(hooks.export(net(), (image(),), tmp_path / "net.onnx", fix=QUICK, dynamo=False))
        assert exports == []

    def test_a_failed_export_raises(self, unpatched: Any, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError, match="channels"), hooks.patched():
            torch.onnx.export(net(), (torch.rand(1, 4, 8, 8),), str(tmp_path / "net.onnx"), dynamo=False)

    @newer
    def test_a_program_is_fixed_when_it_is_saved(self, unpatched: Any, tmp_path: Path) -> None:
        with hooks.patched(fix=QUICK) as exports:
            program = torch.onnx.export(net(), (image(),), dynamo=True, verbose=False)
        assert exports == []
        program.save(tmp_path / "net.onnx")
        assert exports[0].path == tmp_path / "net.onnx"
        fixed(exports[0])
