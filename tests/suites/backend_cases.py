"""The cases of ONNX's backend suite: models of every operator, with inputs."""

import warnings
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper

KINDS = ("simple", "pytorch-operator", "pytorch-converted")
"""Folders of models with data. `node` is made by code, `light` has models alone, `real` is downloaded."""

FEWEST_MADE = 1700  # cases of the kind `node`: onnx 1.21 to 1.23 make more


@dataclass(frozen=True)
class Case:
    """One model with one sample; `model` is serialized, a feed is whatever the suite has."""

    name: str
    model: bytes
    feeds: dict[str, Any]


def cases(*, light: bool = True) -> Iterator[Case]:
    """Every case that needs no download, the cheapest kinds last; `light` are networks of up to 550 MB."""
    from onnx.backend.test import loader

    if light:
        yield from _light(Path(loader.DATA_DIR) / "light")
    for kind in KINDS:
        for path in sorted((Path(loader.DATA_DIR) / kind).glob("*/model.onnx")):
            yield _stored(f"{kind}/{path.parent.name}", path)
    with warnings.catch_warnings():  # of numpy, about the overflows that the cases are about
        warnings.simplefilter("ignore")
        made = loader.load_model_tests(kind="node")
    require_all(made)
    for case in sorted(made, key=lambda case: case.name):
        assert case.model is not None and case.data_sets is not None
        inputs = list(case.data_sets[0][0])
        names = [value.name for value in case.model.graph.input]
        feeds = dict(zip(names, map(_plain, inputs), strict=False))
        yield Case(f"node/{case.name}", case.model.SerializeToString(), feeds)


def require_all(made: Sized) -> None:
    """Checks that onnx made all its cases.

    Raises:
        RuntimeError: it made a part of them.
    """
    if len(made) < FEWEST_MADE:
        raise RuntimeError(
            f"onnx made {len(made)} cases: a test in this process called its collect_testcases(op_type), "
            "whose choice holds until the process ends; build that model another way"
        )


def _plain(value: Any) -> Any:
    """The feed as an array where it is a tensor."""
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _light(folder: Path) -> Iterator[Case]:
    """Whole networks with weights of ConstantOfShape; feeds are random."""
    for path in sorted(folder.glob("*.onnx")):
        yield Case(f"light/{path.stem}", path.read_bytes(), {})


def _stored(name: str, path: Path) -> Case:
    proto = onnx.load(path)
    feeds: dict[str, Any] = {}
    for number, value in enumerate(proto.graph.input):
        file = path.parent / "test_data_set_0" / f"input_{number}.pb"
        if file.exists():
            feeds[value.name] = _read(value.type, file.read_bytes())
    return Case(name, proto.SerializeToString(), feeds)


def _read(kind: onnx.TypeProto, data: bytes) -> Any:
    if kind.HasField("tensor_type"):
        return numpy_helper.to_array(onnx.TensorProto.FromString(data))
    if kind.HasField("sequence_type"):
        return numpy_helper.to_list(onnx.SequenceProto.FromString(data))
    return numpy_helper.to_optional(onnx.OptionalProto.FromString(data))
