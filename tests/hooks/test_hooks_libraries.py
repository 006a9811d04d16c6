"""The hooks of Lightning, Ultralytics and Optimum with the real libraries, and without them."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from paths import ROOT

from rewriter.base.errors import ModelError, UsageError
from rewriter.hooks.fixing import FixWarning
from rewriter.ir.model import load

pytest.importorskip("hooked", reason="PyTorch is not installed: pip install '.[hooks]'")
from hooked import Net, casts, torch
from tables import values

pytestmark = pytest.mark.filterwarnings("ignore")
MISSING = "is not installed: pip install '.[hooks-test]'"


@values
def test_a_missing_library_is_one_clear_line(hook: str, module: str, package: str) -> None:
    code = f"import sys; sys.modules[{module!r}] = None\nimport rewriter.hooks.{hook}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    line = done.stderr.splitlines()[-1]
    assert f"needs {package}, which is not installed: pip install {package}" in line
    assert line.startswith("ImportError: rewriter.hooks.")
    assert "During handling" not in done.stderr


class TestLightning:
    @pytest.fixture
    def fit(self, tmp_path: Path) -> Any:
        """Trains a small module for two steps with a callback."""
        lightning = pytest.importorskip("lightning.pytorch", reason=f"Lightning {MISSING}")

        class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.net, self.example_input_array = Net(), torch.rand(1, 3, 16, 16)
                self.dropout = torch.nn.Dropout(0.5)

            def forward(self, image: Any) -> Any:
                return self.dropout(self.net(image))

            def training_step(self, batch: Any, _: int) -> Any:
                return self(batch).square().mean()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), 1e-6)

        def run(callback: Any) -> Any:
            trainer = lightning.Trainer(
                max_steps=2,
                logger=False,
                accelerator="cpu",
                default_root_dir=tmp_path,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[
                    callback,
                    lightning.callbacks.ModelCheckpoint(
                        tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1
                    ),
                ],
            )
            module = Module()
            trainer.fit(module, torch.utils.data.DataLoader(torch.rand(2, 3, 16, 16)))
            return module

        return run

    @pytest.mark.parametrize("dynamo", [False, True], ids=["classic", "dynamo"])
    def test_at_the_end_of_training(self, fit: Any, tmp_path: Path, *, dynamo: bool) -> None:
        from rewriter.hooks.lightning import FixOnExport

        path = tmp_path / "exports" / "net.onnx"
        callback = FixOnExport(path, fix={"build": False}, export={"dynamo": dynamo})
        module = fit(callback)
        assert callback.exports[0].error is None
        assert casts(path) > 0
        assert "Dropout" not in [node.op_type for node in load(path).proto.graph.node]
        assert module.training

    def test_with_every_checkpoint(self, fit: Any, tmp_path: Path) -> None:
        from rewriter.hooks.lightning import FixOnExport

        fit(
            FixOnExport(
                tmp_path / "net.onnx", when="checkpoint", fix={"build": False}, export={"dynamo": False}
            )
        )
        assert sorted(p.name for p in tmp_path.glob("*.onnx")) == ["net-step=1.onnx", "net-step=2.onnx"]
        assert casts(tmp_path / "net-step=2.onnx") > 0

    def test_a_failed_export_ends_no_training(self, fit: Any, tmp_path: Path) -> None:
        from rewriter.hooks.lightning import FixOnExport

        with pytest.warns(FixWarning, match="net.onnx"):
            fit(FixOnExport(tmp_path / "net.onnx", example=torch.rand(1, 7, 4, 4), export={"dynamo": False}))

    @pytest.mark.parametrize(
        "options", [{"when": "never"}, {"fix": {"presett": "x"}}], ids=["a time that is none", "typing error"]
    )
    def test_bad_options_are_refused_before_training(self, options: dict[str, Any]) -> None:
        pytest.importorskip("lightning.pytorch", reason=f"Lightning {MISSING}")
        from rewriter.hooks.lightning import FixOnExport

        with pytest.raises(UsageError):
            FixOnExport(**options)


class TestUltralytics:
    @pytest.fixture
    def yolo(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        """A YOLO with random weights. Ultralytics asks for torchvision's version alone."""
        monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
        monkeypatch.setenv("YOLO_AUTOINSTALL", "false")
        monkeypatch.setenv("YOLO_OFFLINE", "true")
        version = importlib.metadata.version

        def known(name: str) -> str:
            try:
                return version(name)
            except importlib.metadata.PackageNotFoundError:
                if name == "torchvision":
                    return "0.28.0"
                raise

        monkeypatch.setattr(importlib.metadata, "version", known)
        ultralytics = pytest.importorskip("ultralytics", reason=f"Ultralytics {MISSING}")
        monkeypatch.chdir(tmp_path)
        return ultralytics.YOLO("yolo11n.yaml")

    def test_the_real_export_calls_back(self, yolo: Any, tmp_path: Path) -> None:
        from rewriter.hooks.ultralytics import FixOnExport

        pictures = [np.random.default_rng(i).random((1, 3, 64, 64), np.float32) for i in range(2)]
        callback = FixOnExport(fix={"build": False}, calibration=pictures, keep_raw=True, strict=True)
        yolo.add_callback("on_export_end", callback)
        path = Path(yolo.export(format="onnx", imgsz=64, simplify=False))
        assert casts(path) > casts(tmp_path / "yolo11n.raw.onnx")
        assert "names" in {entry.key for entry in onnx.load(path).metadata_props}

    def test_other_formats_are_not_fixed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from rewriter.hooks.ultralytics import FixOnExport

        exporter = SimpleNamespace(args=SimpleNamespace(format="coreml"), file=tmp_path / "net.pt")
        FixOnExport()(exporter)
        assert "format='coreml' is not fixed" in capsys.readouterr().err


class TestOptimum:
    def test_a_folder_that_optimum_wrote(self, tmp_path: Path) -> None:
        optimum = pytest.importorskip("optimum.exporters.onnx", reason=f"Optimum {MISSING}")
        transformers = pytest.importorskip("transformers", reason=f"transformers {MISSING}")
        from rewriter.hooks.optimum import fix_export

        size = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        model = transformers.BertModel(transformers.BertConfig(vocab_size=100, **size)).eval()
        optimum.onnx_export_from_model(
            model, output=tmp_path, task="feature-extraction", opset=17, do_validation=False
        )
        ids = torch.randint(0, 100, (2, 9))
        tokens = {"input_ids": ids, "attention_mask": ids * 0 + 1, "token_type_ids": ids * 0, "labels": ids}
        (fixed,) = fix_export(tmp_path, fix={"build": False}, calibration=[tokens], strict=True)
        path = tmp_path / "model.onnx"
        assert fixed.path == path
        assert fixed.result is not None and fixed.result.data is not None
        assert fixed.result.data.real
        assert casts(path) > 0

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        from rewriter.hooks.optimum import fix_export

        with pytest.raises(ModelError, match=r"there is no \.onnx file"):
            fix_export(tmp_path)
