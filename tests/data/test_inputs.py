"""The user's data: what is read, what is refused and with which words, and random data."""

from __future__ import annotations

import gc
import io
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import graphs
import ml_dtypes
import numpy as np
import pytest
from polygraphy.json import save_json

from rewriter.ir.errors import InputsError, UsageError
from rewriter.ir.model import Array, Model
from rewriter.runtime.engines.deployment import Deployment
from rewriter.runtime.inputs import Samples, load_samples, random_samples

TWO = graphs.graph("g (float[N,3] image, int64[N] ids) => (float[N,3] y) { y = Relu(image) }")
ONE = graphs.graph("g (float[2] x) => (float[2] y) { y = Relu(x) }")


def sample(value: float = 0, rows: int = 2) -> dict[str, Array]:
    return {"image": np.full((rows, 3), value, np.float32), "ids": np.arange(rows)}


def save_npz(path: Path, feeds: dict[str, Any]) -> None:
    np.savez(path, **feeds)


def same(actual: Samples, wanted: list[dict[str, Array]]) -> None:
    """Twice, for samples are read for ranges and for verification."""
    for _ in range(2):
        found = list(actual)
        assert len(found) == len(actual) == actual.source.samples == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            assert a.keys() == b.keys()
            for name in b:
                assert a[name].dtype == b[name].dtype
                np.testing.assert_array_equal(a[name], b[name])


# -- what is read ----------------------------------------------------------------------------

WANTED = [sample(1), sample(2, rows=4), sample(3)]


def npz(folder: Path) -> tuple[Any, list[dict[str, Array]]]:
    save_npz(folder / "one.npz", WANTED[0])
    return folder / "one.npz", WANTED[:1]


def npz_folder(folder: Path) -> tuple[Any, list[dict[str, Array]]]:
    for i, feeds in enumerate(WANTED):
        save_npz(folder / f"{i}.npz", feeds)
    (folder / ".hidden.npz").write_text("not an archive")
    (folder / "notes.txt").write_text("not an array")
    return str(folder), WANTED


def npy_folder(folder: Path) -> tuple[Any, list[dict[str, Array]]]:
    for name, array in WANTED[0].items():
        np.save(folder / f"{name}.npy", array)
    return folder, WANTED[:1]


def npy_folders(folder: Path) -> tuple[Any, list[dict[str, Array]]]:
    for i, feeds in enumerate(WANTED):
        (folder / str(i)).mkdir()
        for name, array in feeds.items():
            np.save(folder / str(i) / f"{name}.npy", array)
    return folder, WANTED


def polygraphy(folder: Path) -> tuple[Any, list[dict[str, Array]]]:
    """Written by the library itself."""
    save_json(WANTED, str(folder / "feeds.json"))
    return folder / "feeds.json", WANTED


FORMS: list[Any] = [
    pytest.param(npz, id="npz"),
    pytest.param(npz_folder, id="folder of npz"),
    pytest.param(npy_folder, id="folder of npy"),
    pytest.param(npy_folders, id="folders of npy"),
    pytest.param(polygraphy, id="polygraphy"),
    pytest.param(lambda _: (WANTED[0], WANTED[:1]), id="dict"),
    pytest.param(lambda _: (WANTED, WANTED), id="list of dicts"),
    pytest.param(lambda _: (iter(WANTED), WANTED), id="generator"),
]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_can_be_read_repeatedly(form: Callable[[Path], Any], tmp_path: Path) -> None:
    data, wanted = form(tmp_path)
    samples = load_samples(data, TWO)
    same(samples, wanted)
    assert samples.source.real


def test_the_source_says_what_was_read(tmp_path: Path) -> None:
    data, _ = npz_folder(tmp_path)
    source = load_samples(data, TWO).source
    assert source.text == f"3 samples from {tmp_path}"
    assert source.spans == {"image": ((2, 3), (2, 3), (4, 3)), "ids": ((2,), (2,), (4,))}


def test_inputs_come_in_the_order_of_the_model() -> None:
    reversed_feeds = dict(reversed(sample().items()))
    assert list(next(iter(load_samples(reversed_feeds, TWO)))) == ["image", "ids"]


def test_one_npy_file_is_enough_for_one_input(tmp_path: Path) -> None:
    np.save(tmp_path / "any.npy", np.ones(2, np.float32))
    same(load_samples(tmp_path / "any.npy", ONE), [{"x": np.ones(2, np.float32)}])


def test_characters_that_no_file_name_can_have_are_underscores(tmp_path: Path) -> None:
    model = ONE.copy()
    model.proto.graph.input[0].name = model.proto.graph.node[0].input[0] = "in/x:0"
    np.save(tmp_path / "in_x_0.npy", np.ones(2, np.float32))
    same(load_samples(tmp_path, model), [{"in/x:0": np.ones(2, np.float32)}])


def test_bfloat16_comes_back_from_an_npz(tmp_path: Path) -> None:
    """numpy keeps its bits and forgets its name."""
    model = graphs.graph("g (bfloat16[2] x) => (bfloat16[2] y) { y = Identity(x) }")
    feeds = {"x": np.array([1.5, -3e38], ml_dtypes.bfloat16)}
    save_npz(tmp_path / "b.npz", feeds)
    same(load_samples(tmp_path / "b.npz", model), [feeds])
    same(load_samples(iter([feeds]), model), [feeds])


def test_big_endian_data_is_accepted() -> None:
    found = next(iter(load_samples({"x": np.array([1, 2], ">f4")}, ONE)))
    assert found["x"].dtype == np.dtype("<f4")
    assert found["x"].tolist() == [1, 2]


def test_one_sample_of_a_generator_is_in_memory_at_a_time() -> None:
    alive = 0

    class Counted(np.ndarray[Any, Any]):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def generate() -> Iterator[dict[str, Array]]:
        nonlocal alive
        for i in range(5):
            gc.collect()
            assert alive <= 1, "the sample before the last is gone"
            array = np.full(2, i, np.float32).view(Counted)
            alive += 1
            yield {"x": array}
            del array

    assert [feeds["x"][0] for feeds in load_samples(generate(), ONE)] == [0, 1, 2, 3, 4]


def test_samples_are_passed_through() -> None:
    samples = load_samples(sample(), TWO)
    assert load_samples(samples, TWO) is samples


# -- what is refused -------------------------------------------------------------------------

BAD: list[Any] = [
    pytest.param({"imgae": 0, "ids": 0}, "no input 'imgae'; did you mean 'image'?", id="a slip in a name"),
    pytest.param({"image": sample()["image"]}, "no array for input 'ids'", id="a missing input"),
    pytest.param({**sample(), "zzz": 1}, "inputs are image (float32), ids (int64)", id="one too many"),
    pytest.param(
        {**sample(), "image": np.ones((2, 3), np.int32)}, "array.astype(np.float32)", id="int32 for float32"
    ),
    pytest.param(
        {**sample(), "ids": np.arange(2, dtype=np.int32)}, "wants int64, the data is int32", id="int32"
    ),
    pytest.param({**sample(), "ids": np.array([{}, {}])}, "objects (pickled data)", id="objects"),
    pytest.param(
        {**sample(), "image": np.ones((2, 4), np.float32)}, "axis 1 must be 3, not 4 [2, 4]", id="axis"
    ),
    pytest.param({**sample(), "image": np.ones(3, np.float32)}, "it must have 2 axes, not 1 [3]", id="rank"),
    pytest.param({**sample(), "ids": np.arange(5)}, "axis 0 (N) is 5, but N is 2 in 'image'", id="N differs"),
    pytest.param([sample(), [1, 2]], "sample 1: a sample is a list, not a dict", id="a list for a dict"),
    pytest.param(
        iter([sample(), 3]), "sample 1: a sample is an int, not a dict", id="a generator of numbers"
    ),
    pytest.param([], "there is no sample", id="an empty list"),
    pytest.param(iter([]), "there is no sample", id="an empty generator"),
]


@pytest.mark.parametrize(("data", "words"), BAD)
def test_data_that_does_not_fit_is_refused(data: Any, words: str) -> None:
    with pytest.raises(InputsError) as caught:
        load_samples(data, TWO)
    assert words in str(caught.value)


def missing(folder: Path) -> Path:
    return folder / "no.npz"


def empty(folder: Path) -> Path:
    return folder


def pickled(folder: Path) -> Path:
    np.savez(folder / "p.npz", image=np.array([{"a": 1}], object))
    return folder / "p.npz"


def pickled_npy(folder: Path) -> Path:
    np.save(folder / "image.npy", np.array([{"a": 1}], object))
    return folder


def truncated(folder: Path) -> Path:
    save_npz(folder / "t.npz", sample())
    data = (folder / "t.npz").read_bytes()
    (folder / "t.npz").write_bytes(data[: len(data) // 2])
    return folder / "t.npz"


def truncated_npy(folder: Path) -> Path:
    np.save(folder / "image.npy", np.ones(100))
    data = (folder / "image.npy").read_bytes()
    (folder / "image.npy").write_bytes(data[:-50])
    return folder


def not_an_archive(folder: Path) -> Path:
    np.save(folder / "x.npy", np.ones(2))
    (folder / "x.npy").rename(folder / "x.npz")
    return folder / "x.npz"


def mixed(folder: Path) -> Path:
    np.save(folder / "image.npy", np.ones(2))
    np.savez(folder / "one.npz", image=np.ones(2))
    return folder


def npy_for_two(folder: Path) -> Path:
    np.save(folder / "x.npy", np.ones(2))
    return folder / "x.npy"


def text(content: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / "feeds.json").write_text(content)
        return folder / "feeds.json"

    return write


def claims(name: str, member: str) -> Callable[[Path], Path]:
    """An npy file, or one in an npz file, whose header claims more than the file and any memory holds."""

    def write(folder: Path) -> Path:
        stream = io.BytesIO()
        header = {"descr": "<f4", "fortran_order": False, "shape": (10**6, 10**6)}
        np.lib.format.write_array_header_1_0(stream, header)
        if not member:
            (folder / name).write_bytes(stream.getvalue())
            return folder
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr(member, stream.getvalue())
        return folder / name

    return write


FILES: list[Any] = [
    pytest.param(missing, "no such file or folder", id="missing"),
    pytest.param(empty, "it holds no sample", id="empty folder"),
    pytest.param(pickled, "p.npz: it holds Python objects", id="pickled npz"),
    pytest.param(pickled_npy, "image.npy: it holds Python objects", id="pickled npy"),
    pytest.param(truncated, "not an npz archive, or a truncated one", id="truncated npz"),
    pytest.param(truncated_npy, "it cannot be read", id="truncated npy"),
    pytest.param(not_an_archive, "not an npz archive", id="npy called npz"),
    pytest.param(mixed, "a mixture of .npz files, .npy files", id="mixture"),
    pytest.param(npy_for_two, "from a .npy file", id="one npy for two inputs"),
    pytest.param(text("{"), "feeds.json: it cannot be read", id="broken JSON"),
    pytest.param(text("[" * 200_000), "it is nested too deeply", id="JSON of nested lists"),
    pytest.param(text('{"a":' * 200_000), "it is nested too deeply", id="JSON of nested dicts"),
    pytest.param(text("3"), "sample 0: it cannot be read", id="JSON of a number"),
    pytest.param(text("[]"), "there is no sample", id="JSON of nothing"),
    pytest.param(text('[{"image": [1, 2]}]'), "sample 0: it cannot be read", id="JSON of plain lists"),
    pytest.param(text('[{"image": {"array": "!!"}}]'), "polygraphy.json.save_json", id="JSON, not base64"),
    pytest.param(claims("image.npy", ""), "it cannot be read", id="npy that claims terabytes"),
    pytest.param(claims("z.npz", "image.npy"), "it cannot be read", id="npz that claims terabytes"),
]


@pytest.mark.parametrize(("make", "words"), FILES)
def test_files_that_cannot_be_read_are_named(
    make: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    path = make(tmp_path)
    with pytest.raises(InputsError) as caught:
        load_samples(path, TWO)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_the_wrong_file_of_several_is_named(tmp_path: Path) -> None:
    npz_folder(tmp_path)
    np.savez(tmp_path / "1.npz", image=np.ones((2, 3), np.int32), ids=np.arange(2))
    with pytest.raises(InputsError, match=r"1\.npz: input 'image': the model wants float32"):
        load_samples(tmp_path, TWO)


# -- random data -----------------------------------------------------------------------------


def first(model: Model, **options: Any) -> dict[str, Array]:
    return next(iter(random_samples(model, **options)))


def test_the_same_seed_gives_the_same_data() -> None:
    same(random_samples(ONE, 3, seed=5), list(random_samples(ONE, 3, seed=5)))
    a, b = random_samples(ONE, 2, seed=5)
    assert (a["x"] != b["x"]).any()
    assert (a["x"] != first(ONE, seed=6)["x"]).any()


def test_floats_are_standard_normal() -> None:
    model = graphs.graph("g (float[100,100] x, double[100,100] d) => (float[100,100] y) { y = Relu(x) }")
    for array in first(model).values():
        assert abs(array.mean()) < 0.05
        assert array.std() == pytest.approx(1, abs=0.05)


def test_the_source_says_that_no_real_data_was_used() -> None:
    source = random_samples(ONE, seed=3).source
    assert source.text == "random inputs, seed 3 (no real data was used; ranges may not be representative)"
    assert (source.real, source.samples, source.spans["x"]) == (False, 1, ((2,), (2,), (2,)))


ROWS = ", ".join(["0"] * 28)
TABLE = f"<float[7,4] table = {{{ROWS}}}, int64[1] zero = {{0}}>"
LOOKUPS = [
    pytest.param("y = Gather(table, ids)", 7, id="directly"),
    pytest.param(
        "a = Cast<to=6>(ids) b = Unsqueeze(a, zero) y = Gather(table, b)", 7, id="through Cast and Unsqueeze"
    ),
    pytest.param("t = Transpose(table) y = Gather<axis=1>(t, ids)", 7, id="another axis"),
    pytest.param("y = Gather<axis=-1>(table, ids)", 4, id="a negative axis"),
    pytest.param(
        "a = Gather(table, ids) b = Gather<axis=1>(table, ids) y = Concat<axis=0>(a, b)",
        4,
        id="the smaller of two tables",
    ),
    pytest.param("c = Concat<axis=0>(zero, ids) y = Gather(table, c)", 7, id="through Concat"),
    pytest.param("p = Gather(ids, zero) y = Gather(table, p)", 7, id="gathered themselves"),
]


@pytest.mark.parametrize(("lines", "rows"), LOOKUPS)
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_ids_stay_within_their_table(lines: str, rows: int, dtype: str) -> None:
    if dtype == "int32":
        lines = lines.replace("(ids)", "(ids64)").replace(", ids)", ", ids64)").replace("(ids,", "(ids64,")
        lines = "ids64 = Cast<to=7>(ids) " + lines
    model = graphs.graph(f"g ({dtype}[200] ids) => (float[?,?] y) {TABLE} {{ {lines} }}")
    ids = first(model)["ids"]
    assert set(ids.tolist()) == set(range(rows))


NO_TABLE = [
    pytest.param(
        "int64[8] sizes", "f = Cast<to=1>(sizes) y = Relu(f)", 1, id="an integer that indexes nothing"
    ),
    pytest.param("int64[8] attention_mask", "y = Gather(table, attention_mask)", 1, id="a mask is a mask"),
    pytest.param("float[8] token_mask", "y = Relu(token_mask)", 1, id="a mask of floats"),
    pytest.param("bool[8] keep", "y = Cast<to=1>(keep)", True, id="booleans"),
    pytest.param("int64[8] ids, float[N,2] rows", "y = Gather(rows, ids)", 0, id="a table of unknown size"),
]


@pytest.mark.parametrize(("ports", "lines", "value"), NO_TABLE)
def test_other_integers_and_masks(ports: str, lines: str, value: float) -> None:
    model = graphs.graph(f"g ({ports}) => (float y) {TABLE} {{ {lines} }}")
    found = next(iter(first(model).values()))
    assert (found == value).all()


def test_bytes_are_uniform() -> None:
    model = graphs.graph("g (uint8[1,64,64,3] image) => (float[1,64,64,3] y) { y = Cast<to=1>(image) }")
    image = first(model)["image"]
    assert (image.min(), image.max()) == (0, 255)


def shaped(*ports: str) -> Model:
    names = [p.split()[-1] for p in ports]
    body = " ".join(f"y{i} = Identity({n})" for i, n in enumerate(names))
    outs = ", ".join(f"float y{i}" for i in range(len(names)))
    return graphs.graph(f"g ({', '.join(ports)}) => ({outs}) {{ {body} }}")


SIZES: list[Any] = [
    pytest.param(["float[N,3,H,W] x"], {}, {"x": (1, 3, 224, 224)}, "N = 1, H = 224, W = 224", id="an image"),
    pytest.param(
        ["float[?,3,?,?] x"], {}, {"x": (1, 3, 224, 224)}, "x axis 0 = 1, x axis 2 = 224", id="no names"
    ),
    pytest.param(["float[N,L,8] x"], {}, {"x": (1, 32, 8)}, "N = 1, L = 32", id="a sequence"),
    pytest.param(["float[L,batch,8] x"], {}, {"x": (1, 1, 8)}, "batch = 1", id="batch in the middle"),
    pytest.param(
        ["float[B,L] x", "float[L] z"], {}, {"x": (1, 32), "z": (32,)}, "L = 32", id="one value for a name"
    ),
    pytest.param(
        ["float[B,L] x", "float[B,L] z"], {"x": (2, 5)}, {"x": (2, 5), "z": (2, 5)}, None, id="a shape given"
    ),
    pytest.param(["float x"], {}, {"x": ()}, None, id="a scalar"),
    pytest.param(["float[?,?] x"], {"x": (4, 5)}, {"x": (4, 5)}, None, id="nothing but a given shape"),
]


@pytest.mark.parametrize(("ports", "given", "wanted", "words"), SIZES)
def test_free_dimensions(ports: list[str], given: Any, wanted: Any, words: str | None) -> None:
    samples = random_samples(shaped(*ports), input_shapes=given)
    assert {name: array.shape for name, array in next(iter(samples)).items()} == wanted
    assert words in samples.source.text if words else ", with" not in samples.source.text


REFUSED: list[Any] = [
    pytest.param({"imgae": (1,)}, "no input 'imgae'; did you mean 'image'?", id="a slip in a name"),
    pytest.param({"image": (2, 4)}, "axis 1 must be 3, not 4", id="a fixed axis"),
    pytest.param({"image": (2,)}, "it must have 2 axes, not 1", id="another rank"),
    pytest.param({"image": (2, 3), "ids": (5,)}, "axis 0 (N) is 5, but N is 2 in 'image'", id="two sizes"),
]


@pytest.mark.parametrize(("shapes", "words"), REFUSED)
def test_shapes_that_contradict_the_model(shapes: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(InputsError) as caught:
        random_samples(TWO, input_shapes=shapes)
    assert words in str(caught.value)
    assert "`input-shapes" in str(caught.value)


def of_unknown_rank() -> Model:
    model = ONE.copy()
    model.proto.graph.input[0].type.tensor_type.ClearField("shape")
    return model


def test_an_input_of_unknown_rank_needs_a_shape() -> None:
    with pytest.raises(InputsError, match="`input-shapes=x:1x3x224x224`"):
        random_samples(of_unknown_rank())
    assert first(of_unknown_rank(), input_shapes={"x": (2,)})["x"].shape == (2,)


def test_strings_cannot_be_random() -> None:
    model = graphs.graph("g (string[2] s) => (string[2] y) { y = Identity(s) }")
    with pytest.raises(InputsError, match="only numbers can be random"):
        random_samples(model)


@pytest.mark.parametrize(
    "feed",
    [
        pytest.param(np.ones(2, np.float32), id="an array"),
        pytest.param([np.ones(2, np.float32), np.ones(3, np.float32)], id="a list of different lengths"),
    ],
)
def test_sequences_cannot_be_fed(feed: object) -> None:
    model = graphs.graph("g (seq(float[2]) s) => (float[N] y) { y = ConcatFromSequence<axis=0>(s) }")
    with pytest.raises(InputsError, match="a sequence, map or optional"):
        load_samples({"s": feed}, model)


def test_lists_of_different_lengths_are_refused_with_the_input() -> None:
    model = graphs.graph("g (float[N,L] x) => (float[N,L] y) { y = Relu(x) }")
    with pytest.raises(InputsError, match="input 'x': it is a list whose parts differ in shape"):
        load_samples({"x": [[1.0, 2.0], [3.0]]}, model)


# -- the samples of a run --------------------------------------------------------------------

PROFILE = Deployment(profile={"image": ((1, 3), (5, 3), (8, 3)), "ids": ((1,), (5,), (8,))})


def test_without_data_there_is_one_random_sample_of_the_usual_shape() -> None:
    samples = load_samples(None, TWO, seed=4, deployment=PROFILE)
    same(samples, list(random_samples(TWO, seed=4, input_shapes={"image": (5, 3)})))
    assert not samples.source.real


def test_shapes_given_by_the_user_replace_the_usual_ones() -> None:
    samples = load_samples(None, TWO, input_shapes={"image": [7, 3], "ids": [7]}, deployment=PROFILE)
    assert next(iter(samples))["image"].shape == (7, 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [({"inputs": sample(rows=9)}, "the profile goes from"), ({"inputs": None}, "no input 'imag'")],
    ids=["data outside the profile", "a profile of another model"],
)
def test_the_profile_is_checked(given: dict[str, Any], words: str) -> None:
    profile = PROFILE if given["inputs"] else Deployment(profile={"imag": ((1,), (1,), (1,))})
    with pytest.raises(UsageError, match=words):
        load_samples(**given, model=TWO, deployment=profile)
