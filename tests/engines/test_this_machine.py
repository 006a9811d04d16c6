"""The engines that run on a machine, and the reasons why others do not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from needs import needs_rtx, without_gpu

from rewriter.ir.base import Target
from rewriter.ir.errors import EngineError
from rewriter.runtime.engines import nvidia_driver, this_machine
from rewriter.runtime.engines.caches import user_cache
from rewriter.runtime.engines.nvidia_driver import Gpu
from rewriter.runtime.engines.protocol import EngineLayer
from rewriter.runtime.engines.tensorrt_library import layers_of

H200 = Gpu("NVIDIA H200", (9, 0), (13, 0))
ADA = Gpu("NVIDIA L4", (8, 9), (13, 0))


@pytest.mark.parametrize(
    ("module", "release", "gpu", "refused"),
    [
        ("tensorrt_rtx", "1.7.1.116", H200, True),
        ("tensorrt_rtx", "1.8.0", H200, True),
        ("tensorrt_rtx", "1.6.1.120", H200, False),
        ("tensorrt_rtx", "1.7.1.116", ADA, False),
        ("tensorrt", "11.0.0", H200, False),
        ("tensorrt_rtx", "", H200, False),
    ],
    ids=["1.7 on Hopper", "1.8 on Hopper", "1.6 on Hopper", "1.7 on Ada", "tensorrt", "unknown release"],
)
def test_releases_that_do_not_load_are_refused(module: str, release: str, gpu: Gpu, refused: bool) -> None:
    problem = this_machine.refusal(module, release, gpu)
    assert (problem is not None) == refused


def test_the_refusal_says_what_to_do() -> None:
    problem = this_machine.refusal("tensorrt_rtx", "1.7.1.116", H200)
    assert str(problem) == (
        "TensorRT-RTX 1.7.1.116 does not load engines on compute capability 9.0 (NVIDIA H200); 1.6.1 does\n"
        '  what to do: pip install "tensorrt-rtx<1.7"'
    )


def test_a_gpu_describes_itself() -> None:
    assert str(H200) == "NVIDIA H200 (compute capability 9.0, driver for CUDA 13.0)"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023",
            "535.104.05",
            id="closed",
        ),
        pytest.param(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build",
            "580.65.06",
            id="open",
        ),
        pytest.param("GCC version: 12.2.0", "", id="no release"),
    ],
)
def test_the_release_of_the_driver_is_read(text: str, expected: str) -> None:
    assert nvidia_driver.release(text) == expected


@without_gpu
def test_without_a_gpu_only_onnx_runtime_is_available() -> None:
    assert not nvidia_driver.has_gpu()
    choice = this_machine.choose()
    assert choice.engine is None
    assert choice.reasons == ("there is no NVIDIA driver here, or it sees no GPU",)
    assert this_machine.require("onnxruntime") == "onnxruntime"
    for engine in ("tensorrt", "tensorrt-rtx", "onnxruntime-cuda"):
        with pytest.raises(EngineError, match=f"{engine} runs on a GPU"):
            this_machine.require(engine)


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(EngineError, match="no engine 'openvino'"):
        this_machine.require("openvino")


def test_layers_of_an_engine_name_their_onnx_nodes() -> None:
    text = json.dumps(
        {
            "Layers": [
                {
                    "Name": "__myl_Conv",
                    "LayerType": "kgen",
                    "Outputs": [{"Name": "y", "Format/Datatype": "Half"}],
                    "Metadata": "[ONNX Layer: /conv]\u001e[ONNX Layer: /relu | outer (If)]",
                },
                "a name alone",
            ]
        }
    )
    assert layers_of(text) == (
        EngineLayer("__myl_Conv", "kgen", ("/conv", "/relu"), (("y", "Half"),)),
        EngineLayer("a name alone", ""),
    )
    assert layers_of("not JSON") == ()


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWRITER_CACHE", str(tmp_path / "cache"))
    path = user_cache("timing", "tensorrt 10.3 NVIDIA H200/0.cache")
    assert path == tmp_path / "cache" / "timing" / "tensorrt_10.3_NVIDIA_H200_0.cache"
    assert path.parent.is_dir()


@needs_rtx
def test_a_target_gets_the_release_and_the_gpu_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_machine, "gpu", lambda: Gpu("Some GPU", (9, 0), (13, 0)))
    found = this_machine.at_hand(Target("tensorrt-rtx"))
    assert (found.version[:1], found.gpus) == ((1,), ("sm_90",))
    for other in ("tensorrt-rtx 1.0", "tensorrt-rtx sm_89", "jetpack-6.2"):
        assert this_machine.at_hand(Target.parse(other)) == Target.parse(other)
    monkeypatch.setattr(this_machine, "gpu", lambda: None)
    assert this_machine.at_hand(Target("tensorrt-rtx")) == Target("tensorrt-rtx")
