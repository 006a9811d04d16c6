"""From the precision flags of TensorRT 10 and earlier to TensorRT 11, which has none.

Which flags are gone, and what NVIDIA puts in their place: tensorrt-10x-to-11x-trtexec.html (`SOURCE`), and
tensorrt-10x-to-11x-python-api-reference.html and tensorrt-8x-to-10x-trtexec.html (`--workspace`) beside it.
"""

from __future__ import annotations

GUIDE = "https://docs.nvidia.com/deeplearning/tensorrt/11.4.1/api/migration"
SOURCE = f"{GUIDE}/tensorrt-10x-to-11x-trtexec.html"

ABOUT = """\
With `--fp16`, TensorRT 10 and earlier chose FP16 layer by layer, where it was faster, and left inputs and
outputs as the model had them. TensorRT 11 has no such flag: it runs the types that the model says. This
preset writes them into the model: FP16 where the measured ranges allow it, FP32 where they do not, inputs
and outputs as they were. Two steps take the place of one (add `--inputs` with data of yours):

    rewriter fix model.onnx -o fixed.onnx --preset trt11-migrate
    trtexec --onnx=fixed.onnx --saveEngine=model.plan

What the old flag did not do: look at the data. Numbers that left FP16 became Inf; here their nodes stay in
FP32, and `rewriter fix` compares the result with the original, and says so if it differs."""

HEAD = ("up to TensorRT 10", "with TensorRT 11")

ROWS: tuple[tuple[str, str], ...] = (
    ("--fp16", "rewriter fix --preset trt11-migrate"),
    ("--bf16", "rewriter fix --preset trt-bf16 --target 11"),
    ("--fp16 --bf16, --best", "choose one of the two: build both and compare"),
    ("--int8, --calib=FILE", "Q/DQ nodes, put into the model before: `rewriter fix` leaves them in place"),
    ("--fp8, --int4", "Q/DQ nodes, put into the model before"),
    ("--stronglyTyped", "leave it out: networks always are"),
    ("--precisionConstraints=obey", "leave it out: the model's types are obeyed"),
    (
        "--precisionConstraints=prefer",
        "leave it out; --tolerance looks for the cheapest plan that is accurate",
    ),
    ("--layerPrecisions=NAME:fp32", "rewriter fix --keep-fp32 NAME"),
    ("--layerOutputTypes=NAME:fp32", "rewriter fix --keep-fp32 NAME"),
    ("--inputIOFormats=fp16:chw and --outputIOFormats=fp16:chw", "rewriter fix --io fp16, for the types"),
    ("--noTF32", "it stays: without it, FP32 MatMul and Conv may run in TF32"),
    ("--workspace=N (up to 8)", "--memPoolSize=workspace:N, since 10"),
    ("config.set_flag(BuilderFlag.FP16)", "as --fp16; the flag is gone from the Python API, too"),
    (
        "BuilderFlag.OBEY_PRECISION_CONSTRAINTS, layer.precision = trt.float32",
        "rewriter fix --keep-fp32 NAME",
    ),
    ("config.int8_calibrator", "as --int8"),
)
"""Old flags of trtexec and of the Python API, and what to do instead."""
