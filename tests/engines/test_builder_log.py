"""The builder's log shows the kernels whose results are known to be wrong, without a GPU."""

import importlib
import re
from typing import Any

import graphs
import pytest
from needs import needs_rtx
from onnx import ModelProto

from rewriter.ir.model import load
from rewriter.passes.base import Context
from rewriter.passes.decompose_group_norm import DecomposeGroupNorm
from rewriter.passes.work_around_convs import WorkAroundConvs
from rewriter.target import Target
from rewriter.target.probes import Case
from rewriter.target.quirks import table

QUIRKS = {quirk.id: quirk for quirk in table()}
TARGET = Target.parse("tensorrt-rtx 1.6.1")
WRITTEN = re.compile(r"LayerType: correlation.*Outputs: \[ \{[^}]*Dimensions: \[(.*?)\], Strides: \[(.*?)\]")


def log_of(proto: ModelProto) -> list[str]:
    """What the builder says of an engine."""
    rtx: Any = importlib.import_module("tensorrt_rtx")
    lines = list[str]()

    class Logger(rtx.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            rtx.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            lines.extend(text.splitlines())

    logger = Logger()
    builder = rtx.Builder(logger)
    network = builder.create_network(0)
    assert rtx.OnnxParser(network, logger).parse(proto.SerializeToString())
    config = builder.create_builder_config()
    config.profiling_verbosity = rtx.ProfilingVerbosity.DETAILED
    assert builder.build_serialized_network(network, config) is not None
    return lines


def packed(proto: ModelProto) -> list[bool]:
    """For what each Conv writes: True if rows and images (channels last) follow one another without gaps."""
    shown = (found for line in log_of(proto) if (found := WRITTEN.search(line)))
    written = [[[int(n) for n in part.split(",")] for part in found.groups()] for found in shown]
    return [s[2] == d[3] * s[3] and (d[0] == 1 or s[0] == d[2] * s[2]) for d, s in written]


def cases(quirk: str) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in QUIRKS[quirk].case]


@needs_rtx
@pytest.mark.parametrize("case", cases("conv-into-wider-image"))
def test_a_mended_conv_leaves_no_gaps(case: Case) -> None:
    proto = case.proto()
    assert not all(packed(proto)), "this release has no such kernel"
    mended, report = graphs.apply(WorkAroundConvs(), load(proto), Context(target=TARGET))
    assert report.changes
    found = packed(mended.whole())
    assert found and all(found)


@needs_rtx
@pytest.mark.parametrize("case", cases("group-norm-few-channels"))
def test_an_unfolded_group_norm_has_no_kernel_of_its_own(case: Case) -> None:
    proto = case.proto()
    own = re.compile(r"Name: \w*[GI]nor\w*, LayerType")
    assert any(map(own.search, log_of(proto))), "this release has no such kernel"
    unfolded, report = graphs.apply(DecomposeGroupNorm(), load(proto), Context(target=TARGET))
    assert report.changes
    assert not any(map(own.search, log_of(unfolded.whole())))
