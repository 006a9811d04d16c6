"""Files of arrays that claim more than they hold: refused by name, type and shape before they are read."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from graphs import graph

from rewriter.ir.errors import InputsError
from rewriter.runtime.inputs import load_samples, random_samples

MODEL = graph("g (float[2,8] x, float[n,8] z) => (float[2,8] y) { y = Relu(x) }")
TRILLION = (10**6, 10**6)


def npy(shape: tuple[int, ...], values: bytes = b"", dtype: str = "<f4") -> bytes:
    """An npy file whose header claims a shape, and that holds the given bytes."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue() + values


X, Z = npy((2, 8), bytes(64)), npy((3, 8), bytes(96))


def npz(folder: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(folder / "data.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return folder / "data.npz"


def folder_of_npy(folder: Path, **members: bytes) -> Path:
    for name, content in members.items():
        (folder / f"{name}.npy").write_bytes(content)
    return folder


def polygraphy(folder: Path, **members: bytes) -> Path:
    arrays = {name: {"array": base64.b64encode(content).decode()} for name, content in members.items()}
    (folder / "data.json").write_text(json.dumps([arrays]))
    return folder / "data.json"


FORMS = [pytest.param(make, id=make.__name__) for make in (npz, folder_of_npy, polygraphy)]
Form = Callable[..., Path]


@pytest.mark.parametrize("form", FORMS)
def test_good_files_are_read(form: Form, tmp_path: Path) -> None:
    values = np.arange(16, dtype=np.float32).reshape(2, 8)
    (feeds,) = load_samples(form(tmp_path, x=npy((2, 8), values.tobytes()), z=Z), MODEL)
    np.testing.assert_array_equal(feeds["x"], values)
    assert feeds["z"].shape == (3, 8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [TRILLION, (2**62, 4), (2**40, 2**40), (-3, 8)], ids=str)
def test_a_claim_that_the_file_cannot_hold_is_refused(
    form: Form, shape: tuple[int, ...], tmp_path: Path
) -> None:
    with pytest.raises(InputsError, match=r"its header claims the shape") as caught:
        load_samples(form(tmp_path, x=X, z=npy(shape)), MODEL)
    assert "z" in (caught.value.where or "")
    assert caught.value.hint


@pytest.mark.parametrize("form", FORMS)
def test_a_deeply_nested_header_is_refused(form: Form, tmp_path: Path) -> None:
    header = (b"(" * 9000 + b"\n").ljust(9500)
    broken = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with pytest.raises(InputsError, match="it cannot be read"):
        load_samples(form(tmp_path, x=X, z=broken), MODEL)


def broken_data(path: Path) -> Path:
    """Overwrites the data of the first member, so that whoever reads it meets an error."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        first = archive.infolist()[0]
    start = first.header_offset + 30 + len(first.filename) + 200  # behind the header of the array
    content[start : start + 50] = b"!" * 50
    path.write_bytes(content)
    return path


def noise(count: int) -> bytes:
    return np.random.default_rng(0).integers(0, 256, count, np.uint8).tobytes()


def test_names_are_checked_before_any_array_is_read(tmp_path: Path) -> None:
    path = broken_data(npz(tmp_path, big=npy((1000,), noise(4000)), x=X, z=Z))
    with pytest.raises(InputsError, match="the model has no input 'big'"):
        load_samples(path, MODEL)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        pytest.param(((1000,), "<f4"), "it has 2 axes", id="rank"),
        pytest.param(((10, 100), "<f4"), "axis 0 must be 2", id="size"),
        pytest.param(((2, 8), "<i4"), "the model wants float32", id="type"),
    ],
)
def test_shape_and_type_are_checked_before_the_array_is_read(
    header: tuple[tuple[int, ...], str], words: str, tmp_path: Path
) -> None:
    path = broken_data(npz(tmp_path, x=npy(header[0], noise(4000), header[1]), z=Z))
    with pytest.raises(InputsError, match=words):
        load_samples(path, MODEL)


def test_broken_data_of_the_right_shape_are_named(tmp_path: Path) -> None:
    path = broken_data(npz(tmp_path, z=npy((125, 8), noise(4000)), x=X))
    with pytest.raises(InputsError, match=r"data\.npz: array 'z': it cannot be read"):
        load_samples(path, MODEL)


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    path = npz(tmp_path, x=X, z=Z)
    content = bytearray(path.read_bytes())
    for magic, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(magic) + flags] |= 1
    path.write_bytes(content)
    with pytest.raises(InputsError, match="it cannot be read"):
        load_samples(path, MODEL)


def test_random_data_that_no_memory_holds_are_refused() -> None:
    model = graph("g (float[2,4611686018427387904] x) => (float[2,8] y) { y = Relu(x) }")
    with pytest.raises(InputsError, match=r"input 'x': random values .* do not fit into memory"):
        random_samples(model)
