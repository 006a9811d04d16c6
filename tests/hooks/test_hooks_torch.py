"""`rewriter.hooks.torch` with the real PyTorch: both exporters, and whatever may go wrong."""

import inspect
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from tables import values

from rewriter.base.errors import RewriterError, UsageError
from rewriter.hooks.fixing import FixWarning, Unverified
from rewriter.ir.model import load

hooked = pytest.importorskip("hooked", reason="PyTorch is not installed: pip install '.[hooks]'")
from hooked import HAS_DYNAMO, QUICK, casts, fixed, image, net, newer, torch  # noqa: E402

import rewriter.hooks.torch as hooks  # noqa: E402
from rewriter.hooks.optimum import fix_export  # noqa: E402
from rewriter.hooks.ultralytics import FixOnExport  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

EXPORTERS = [
    pytest.param({"dynamo": False, "opset_version": 17}, id="classic"),
    pytest.param({"dynamo": True, "verbose": False}, id="dynamo", marks=newer),
]


def listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def module_with_a_dropout() -> Any:
    return torch.nn.Sequential(net(), torch.nn.Dropout(0.5)).train()


@pytest.mark.parametrize("exporter", EXPORTERS)
class TestExport:
    def test_a_module_in_training_mode_from_a_loader(self, exporter: dict[str, Any], tmp_path: Path) -> None:
        """A shuffled loader with labels, and batches that are larger than the model's."""
        path, raw, plain = tmp_path / "net.onnx", tmp_path / "net.raw.onnx", tmp_path / "plain.onnx"
        torch.onnx.export(module_with_a_dropout().eval(), image(), plain, input_names=["picture"], **exporter)
        loader = torch.utils.data.DataLoader([(image(i)[0], i) for i in range(7)], batch_size=3, shuffle=True)
        more = {"calibration": loader, "samples": 6, "keep_raw": True, "fix": QUICK}
        model, random = module_with_a_dropout(), torch.get_rng_state()
        exported = hooks.export(model, image(), str(path), input_names=["picture"], **more, **exporter)
        assert torch.equal(torch.get_rng_state(), random)
        assert all(module.training for module in (model, model[1]))
        assert (exported.path, exported.raw) == (path, raw)
        assert exported.result is not None and exported.result.plan is not None
        assert exported.result.plan.fp32  # the norm
        assert exported.result.data is not None
        assert (exported.result.data.samples, exported.result.data.real) == (6, True)
        proto = fixed(exported)
        assert [v.name for v in proto.graph.input] == ["picture"]
        assert "Dropout" not in [node.op_type for node in proto.graph.node]
        assert load(raw).whole().graph.node == load(plain).whole().graph.node

    def test_keyword_arguments_and_dynamic_shapes(self, exporter: dict[str, Any], tmp_path: Path) -> None:
        given = {"scale": torch.full((2, 8, 1, 1), 2.0) + image()[:, :1, :1, :1]}
        given["image"] = torch.cat([image(), image(1)])
        args: Any = () if HAS_DYNAMO else (given,)
        more: dict[str, Any] = {"kwargs": given} if HAS_DYNAMO else {}
        if exporter["dynamo"]:
            batch = {0: torch.export.Dim("batch", min=1, max=8)}
            more["dynamic_shapes"] = {"image": batch, "scale": batch}
        else:
            more["dynamic_axes"] = {"image": {0: "batch"}, "scale": {0: "batch"}}
            more["input_names"] = ["image", "scale"]
        proto = fixed(hooks.export(net(), args, tmp_path / "n.onnx", fix=QUICK, **more, **exporter))
        assert all(value.type.tensor_type.shape.dim[0].dim_param for value in proto.graph.input)
        assert len(proto.graph.input) == 2


def test_a_stream_is_the_plain_export() -> None:
    stream = io.BytesIO()
    with pytest.warns(FixWarning, match="f=: a stream cannot be fixed"):
        hooks.export(net(), (image(),), stream, fix=QUICK, dynamo=False)
    assert onnx.load_model_from_string(stream.getvalue()).graph.node


@newer
def test_without_a_file_the_result_has_the_model() -> None:
    exported = hooks.export(net(), (image(),), fix=QUICK, dynamo=True, verbose=False)
    assert exported.path is None
    assert type(exported.program).__name__ == "ONNXProgram"
    assert len(fixed(exported).graph.input) == 1


@newer
def test_weights_in_a_file_of_their_own_stay_in_one(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    more: dict[str, Any] = {
        "fix": QUICK,
        "keep_raw": True,
        "dynamo": True,
        "verbose": False,
        "external_data": True,
    }
    fixed(hooks.export(net(), (image(),), path, **more))
    exported_data = "net.onnx.data"  # PyTorch's file is not ours to remove; in FP16 the weights are small
    assert listed(tmp_path) == sorted(["net.onnx", exported_data, "net.raw.onnx", "net.raw.onnx.data"])
    assert load(tmp_path / "net.raw.onnx").whole().graph.node


def test_an_input_that_the_graph_does_not_use(tmp_path: Path) -> None:
    class Unused(hooked.Base):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, first: Any, second: Any) -> Any:
            return self.net(second)

    names: dict[str, Any] = {"input_names": ["first", "second"], "dynamo": False}
    fixed(hooks.export(Unused(), (torch.rand(2, 2), image()), tmp_path / "n.onnx", fix=QUICK, **names))


def test_pytorch_gets_the_arguments_unchanged(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        hooks.export(net(), (image(),), tmp_path / "net.onnx", no_such_argument=1)
    assert listed(tmp_path) == []


@values
def test_a_wrong_option_raises_on_its_line(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    for write in (
        lambda: hooks.export(net(), (image(),), tmp_path / "net.onnx", dynamo=False, **options),
        lambda: hooks.patched(**options),
        lambda: FixOnExport(**options),
        lambda: fix_export(tmp_path, **options),
    ):
        with pytest.raises(UsageError, match=message):
            write()
    assert listed(tmp_path) == []


WIDE = hooked.torch.rand(1, 4, 16, 16)
BAD: list[Any] = [
    pytest.param({"fix": {"preset": "trt-fp12"}}, RewriterError, "trt-fp12", id="a preset that is none"),
    pytest.param({"calibration": []}, RewriterError, "no sample", id="an empty loader"),
    pytest.param({"calibration": [WIDE]}, RewriterError, "axis 1 must be 3", id="a wrong shape"),
    pytest.param({"calibration": ["a"]}, RewriterError, "a sample is a str", id="samples that are none"),
    pytest.param({"fix": {**QUICK, "tolerance": 1e-12}}, Unverified, "failed its", id="out of reach"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD)
def test_a_failed_fix_leaves_the_plain_export(
    options: dict[str, Any], kind: type[Exception], message: str, tmp_path: Path
) -> None:
    path, plain = tmp_path / "net.onnx", io.BytesIO()
    torch.onnx.export(net(), (image(),), plain, dynamo=False)
    options = {"fix": QUICK, **options}
    with pytest.warns(FixWarning, match=message) as warned:
        exported = hooks.export(net(), (image(),), path, keep_raw=True, dynamo=False, **options)
    assert len([w for w in warned if w.category is FixWarning]) == 1
    assert isinstance(exported.error, kind)
    assert exported.result is None
    assert path.read_bytes() == plain.getvalue()
    assert listed(tmp_path) == ["net.onnx"]
    with pytest.raises(kind, match=message):
        hooks.export(net(), (image(),), path, strict=True, dynamo=False, **options)


def test_constant_examples_become_random_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    constant = torch.zeros(1, 3, 16, 16)
    exported = hooks.export(net(), (constant,), tmp_path / "n.onnx", fix=QUICK, dynamo=False)
    assert exported.result is not None and exported.result.data is not None
    assert not exported.result.data.real and casts(tmp_path / "n.onnx") > 0
    assert "give calibration=" in capsys.readouterr().err
    hooks.export(net(), (constant,), tmp_path / "n.onnx", fix=QUICK, quiet=True, dynamo=False)
    assert "rewriter" not in capsys.readouterr().err


def test_the_repository_s_table_is_in_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text('[tool.rewriter]\npreset = "trt-bf16"\nbuild = false\n')
    for own, precision in (({}, "bf16"), ({"preset": "trt-fp16"}, "fp16")):
        exported = hooks.export(net(), (image(),), tmp_path / "net.onnx", fix=own, dynamo=False)
        assert exported.result is not None and exported.result.plan is not None
        assert exported.result.plan.precision == precision
    assert "sets preset, build" in capsys.readouterr().err
    (tmp_path / "pyproject.toml").write_text('[tool.rewriter]\npresett = "trt-bf16"\n')
    with pytest.warns(FixWarning, match="unknown key 'presett'"):
        exported = hooks.export(net(), (image(),), tmp_path / "net.onnx", dynamo=False)
    assert exported.result is None


# -- modules that stay in FP32 by name
class Scale(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: Any) -> Any:
        return torch.sin(x.float() * self.gain) * torch.sigmoid(self.gain)


class Trained(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Sequential(Scale())])
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def kept(path: Path, names: list[str], **more: Any) -> list[str]:
    """Operators of the nodes in FP32."""
    net, x = Trained().eval(), torch.randn(2, 8)
    options: dict[str, Any] = {"fix": QUICK, "strict": True, "fp32_modules": names, **more}
    exported = hooks.export(net, (x,), path / "m.onnx", **options)
    assert exported.result is not None
    return [decision.op for decision in exported.result.decisions if decision.rule == "user"]


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_modules_by_name_hold_for_all_inside(exporter: dict[str, Any], tmp_path: Path) -> None:
    assert kept(tmp_path, ["blocks.1"], **exporter) == ["Sin", "Mul"]
    assert kept(tmp_path, ["head"], **exporter) == ["Gemm"]
    assert kept(tmp_path, ["blocks.*"], fix={**QUICK, "keep_fp32": "/head/*"}, dynamo=False) == [
        "Gemm", "Sin", "Mul", "Gemm",
    ]  # fmt: skip
    assert kept(tmp_path, [], **exporter) == []


def test_modules_by_name_without_their_model(tmp_path: Path) -> None:
    torch.onnx.export(Trained().eval(), (torch.randn(2, 8),), tmp_path / "m.onnx", dynamo=False)
    (one,) = fix_export(tmp_path, fp32_modules=["blocks.?"], fix=QUICK, strict=True)
    assert one.result is not None
    assert [d.op for d in one.result.decisions if d.rule == "user"] == ["Gemm", "Sin", "Mul"]


def test_a_name_that_no_module_has_is_an_error_before_the_export(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fp32_modules=: the model has no module 'blocks.3'"):
        kept(tmp_path, ["blocks.3"], dynamo=False)
    assert not list(tmp_path.iterdir())


# -- `patched`: this block, this thread, and PyTorch as it was afterwards
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
