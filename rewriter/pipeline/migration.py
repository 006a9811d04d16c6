"""From the precision flags of TensorRT 10 and earlier to TensorRT 11, which has none.

`SOURCE` lists the removed flags and NVIDIA's replacements. Its siblings are for the Python API
(tensorrt-10x-to-11x-python-api-reference.html) and for `--workspace` (tensorrt-8x-to-10x-trtexec.html).
"""

from __future__ import annotations

GUIDE = "https://docs.nvidia.com/deeplearning/tensorrt/11.4.1/api/migration"
SOURCE = f"{GUIDE}/tensorrt-10x-to-11x-trtexec.html"

ABOUT = """\
With `--fp16`, TensorRT 10 and earlier chose FP16 for each layer where it was faster, and kept the types of
inputs and outputs. TensorRT 11 has no such flag: it runs the types that are in the model. This preset
writes them into the model: FP16 where the measured ranges allow it, FP32 where they do not, and inputs and
outputs unchanged. Two commands replace one (add `--inputs` with your data):

    rewriter fix model.onnx -o fixed.onnx --preset trt11-migrate
    trtexec --onnx=fixed.onnx --saveEngine=model.plan

The old flag ignored the data: numbers beyond FP16's range became Inf. Here their nodes stay in FP32.
`rewriter fix` compares the result with the original, and reports a difference."""

HEAD = ("up to TensorRT 10", "with TensorRT 11")

ROWS: tuple[tuple[str, str], ...] = (
    ("--fp16", "rewriter fix --preset trt11-migrate"),
    ("--bf16", "rewriter fix --preset trt-bf16 --target 11"),
    ("--fp16 --bf16, --best", "choose one of the two: build both and compare"),
    ("--int8, --calib=FILE", "Q/DQ nodes, added to the model first: `rewriter fix` keeps them"),
    ("--fp8, --int4", "Q/DQ nodes, added to the model first"),
    ("--stronglyTyped", "omit it: networks are always strongly typed"),
    ("--precisionConstraints=obey", "omit it: the model's types are obeyed"),
    (
        "--precisionConstraints=prefer",
        "omit it; --tolerance searches for the cheapest accurate plan",
    ),
    ("--layerPrecisions=NAME:fp32", "rewriter fix --keep-fp32 NAME"),
    ("--layerOutputTypes=NAME:fp32", "rewriter fix --keep-fp32 NAME"),
    ("--inputIOFormats=fp16:chw and --outputIOFormats=fp16:chw", "rewriter fix --io fp16 (types only)"),
    ("--noTF32", "keep it: without it, FP32 MatMul and Conv may run in TF32"),
    ("--workspace=N (up to 8)", "--memPoolSize=workspace:N, since 10"),
    ("config.set_flag(BuilderFlag.FP16)", "as for --fp16; the Python API has no such flag either"),
    (
        "BuilderFlag.OBEY_PRECISION_CONSTRAINTS, layer.precision = trt.float32",
        "rewriter fix --keep-fp32 NAME",
    ),
    ("config.int8_calibrator", "as for --int8"),
    (
        "polygraphy run --trt --fp16, polygraphy convert --fp16",
        "as for --fp16 of trtexec; then omit it",
    ),
    ("polygraphy --precision-constraints=obey", "omit it: the model's types are obeyed"),
    ("polygraphy --layer-precisions NAME:float32", "rewriter fix --keep-fp32 NAME"),
    ("polygraphy --tf32", "stays: it switches TF32 on; without it, Polygraphy builds without TF32"),
    ("polygraphy debug precision", "rewriter locate finds the tensor, rewriter fix the nodes"),
)
"""Old flags of trtexec and of the Python API, with their replacements."""
