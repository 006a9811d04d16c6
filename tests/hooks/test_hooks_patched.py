"""`rewriter.hooks.torch.patched`: this block, this thread, and PyTorch as it was afterwards."""

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

hooked = pytest.importorskip("hooked", reason="PyTorch is not installed: pip install '.[hooks]'")
from hooked import QUICK, casts, fixed, image, net, newer, torch  # noqa: E402

import rewriter.hooks.torch as hooks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[Any]:
    """PyTorch's exporter, which has to be there again after the test."""
    original = torch.onnx.export
    yield original
    assert torch.onnx.export is original


def users_export(path: Path) -> None:
    torch.onnx.export(net(), (image(),), str(path), dynamo=False)


def test_only_the_block_and_its_thread_are_affected(tmp_path: Path) -> None:
    names = ["in", "inner", "thread", "after"]
    inside, inner, other, after = (tmp_path / f"{name}.onnx" for name in names)
    thread = threading.Thread(target=users_export, args=(other,))
    with hooks.patched(preset="trt-bf16", fix=QUICK) as exports:
        with hooks.patched(fix=QUICK) as nested:
            users_export(inner)
        users_export(inside)
        thread.start()
        thread.join()
    users_export(after)
    assert ([e.path for e in exports], [e.path for e in nested]) == ([inside], [inner])
    assert exports[0].result is not None and exports[0].result.plan is not None
    assert exports[0].result.plan.precision == "bf16"
    assert casts(inner) > 0
    assert casts(other) == casts(after) == 0


def test_a_decorator(tmp_path: Path) -> None:
    decorated = hooks.patched(fix=QUICK)(users_export)
    for name in ("first.onnx", "second.onnx"):
        decorated(tmp_path / name)
        assert casts(tmp_path / name) > 0


def test_an_error_restores_the_exporter(unpatched: Any, tmp_path: Path) -> None:
    with hooks.patched():
        assert torch.onnx.export is not unpatched
        assert inspect.signature(torch.onnx.export) == inspect.signature(unpatched)
    exported = hooks.patched()(torch.onnx.export)
    with pytest.raises(RuntimeError, match="channels"):
        exported(net(), (torch.rand(1, 4, 8, 8),), str(tmp_path / "net.onnx"), dynamo=False)


def test_two_threads_that_overlap(unpatched: Any, tmp_path: Path) -> None:
    """The block that ends first leaves the other's replacement in place, and its own does nothing more."""
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with hooks.patched():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with hooks.patched(fix=QUICK) as exports:
        thread.start()
        assert inside.wait(10)
    assert torch.onnx.export is not unpatched
    users_export(tmp_path / "after.onnx")
    leave.set()
    thread.join()
    assert exports == [] and casts(tmp_path / "after.onnx") == 0
    torch.onnx.export = unpatched


def test_another_replacement_of_the_function_is_kept(unpatched: Any) -> None:
    try:
        with hooks.patched():
            ours = torch.onnx.export
            theirs = torch.onnx.export = lambda *args, **kwargs: ours(*args, **kwargs)
            with pytest.raises(TypeError, match="no_such"):  # and PyTorch's exporter is beneath both
                torch.onnx.export(net(), (image(),), "net.onnx", no_such=1)
        assert torch.onnx.export is theirs
    finally:
        torch.onnx.export = unpatched


def test_export_inside_fixes_once(tmp_path: Path) -> None:
    with hooks.patched(fix=QUICK) as exports:
        fixed(hooks.export(net(), (image(),), tmp_path / "net.onnx", fix=QUICK, dynamo=False))
    assert exports == []


@newer
def test_a_program_is_fixed_when_it_is_saved(tmp_path: Path) -> None:
    with hooks.patched(fix=QUICK) as exports:
        program = torch.onnx.export(net(), (image(),), dynamo=True, verbose=False)
    assert exports == []
    program.save(tmp_path / "net.onnx")
    assert exports[0].path == tmp_path / "net.onnx"
    fixed(exports[0])
