"""The user's data: what is read, what is refused and with which words, and random data."""

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
from tables import values

import rewriter
from rewriter.base.errors import InputsError, UsageError
from rewriter.ir.model import Array, Model
from rewriter.runtime.engines.deployment import Deployment
from rewriter.runtime.inputs import Samples, load_samples, random_samples

TWO = graphs.graph("g (float[N,3] image, int64[N] ids) => (float[N,3] y) { y = Relu(image) }")
ONE = graphs.graph("g (float[2] x) => (float[2] y) { y = Relu(x) }")


def sample(value: float = 0, rows: int = 2) -> dict[str, Array]:
    return {"image": np.full((rows, 3), value, np.float32), "ids": np.arange(rows)}


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


def write(folder: Path, *files: tuple[str, Any]) -> Path:
    """Writes arrays, dicts of arrays, bytes or texts to files by name, and returns the folder."""
    for name, content in files:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, dict):
            np.savez(path, **content)
        elif isinstance(content, np.ndarray):
            np.save(path, content)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def polygraphy(folder: Path) -> Path:
    """Written by the library itself."""
    save_json(WANTED, str(folder / "feeds.json"))
    return folder / "feeds.json"


HIDDEN = ((".hidden.npz", "not an archive"), ("notes.txt", "not an array"))
NPY = [[(f"{n}.npy", a) for n, a in feeds.items()] for feeds in WANTED]
NESTED = [(f"{i}/{n}", a) for i, files in enumerate(NPY) for n, a in files]
FORMS: list[Any] = [
    pytest.param(lambda f: write(f, ("one.npz", WANTED[0])) / "one.npz", WANTED[:1], id="npz"),
    pytest.param(
        lambda f: str(write(f, *((f"{i}.npz", one) for i, one in enumerate(WANTED)), *HIDDEN)),
        WANTED,
        id="folder of npz",
    ),
    pytest.param(lambda f: write(f, *NPY[0]), WANTED[:1], id="folder of npy"),
    pytest.param(lambda f: write(f, *NESTED), WANTED, id="folders of npy"),
    pytest.param(polygraphy, WANTED, id="polygraphy"),
    pytest.param(lambda _: dict(reversed(WANTED[0].items())), WANTED[:1], id="dict in another order"),
    pytest.param(lambda _: WANTED, WANTED, id="list of dicts"),
    pytest.param(lambda _: iter(WANTED), WANTED, id="generator"),
    pytest.param(lambda _: load_samples(WANTED, TWO), WANTED, id="samples"),
]


@pytest.mark.parametrize(("form", "wanted"), FORMS)
def test_every_form_is_read(
    form: Callable[[Path], Any], wanted: list[dict[str, Array]], tmp_path: Path
) -> None:
    samples = load_samples(form(tmp_path), TWO)
    same(samples, wanted)
    assert samples.source.real and list(next(iter(samples))) == ["image", "ids"]
    if len(wanted) == 3:
        assert samples.source.spans == {"image": ((2, 3), (2, 3), (4, 3)), "ids": ((2,), (2,), (4,))}


NAMED = ONE.copy()
NAMED.proto.graph.input[0].name = NAMED.proto.graph.node[0].input[0] = "in/x:0"
BRAIN = graphs.graph("g (bfloat16[2] x) => (bfloat16[2] y) { y = Identity(x) }")
BITS = {"x": np.array([1.5, -3e38], ml_dtypes.bfloat16)}
ONES = np.ones(2, np.float32)
READ: list[Any] = [
    pytest.param(ONE, lambda f: write(f, ("any.npy", ONES)) / "any.npy", {"x": ONES}, id="one npy"),
    pytest.param(NAMED, lambda f: write(f, ("in_x_0.npy", ONES)), {"in/x:0": ONES}, id="odd characters"),
    pytest.param(BRAIN, lambda f: write(f, ("b.npz", BITS)) / "b.npz", BITS, id="bits of BF16 in an npz"),
    pytest.param(BRAIN, lambda _: iter([BITS]), BITS, id="BF16 of a generator"),
    pytest.param(ONE, lambda _: {"x": ONES.astype(">f4")}, {"x": ONES}, id="another byte order"),
]


@pytest.mark.parametrize(("model", "form", "feeds"), READ)
def test_names_and_types_are_the_models(
    model: Model, form: Callable[[Path], Any], feeds: dict[str, Array], tmp_path: Path
) -> None:
    same(load_samples(form(tmp_path), model), [feeds])


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


# -- what is refused -------------------------------------------------------------------------
BAD: list[Any] = [
    pytest.param({"imgae": 0, "ids": 0}, "no input 'imgae'; did you mean 'image'?", id="a slip in a name"),
    pytest.param({"image": sample()["image"]}, "no array for input 'ids'", id="a missing input"),
    pytest.param({**sample(), "zzz": 1}, "inputs are image (float32), ids (int64)", id="one too many"),
    pytest.param({**sample(), "image": np.ones((2, 3), np.int32)}, "array.astype(np.float32)", id="int32"),
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
    pytest.param(iter([sample(), 3]), "sample 1: a sample is an int, not a dict", id="a stream of numbers"),
    pytest.param([], "there is no sample", id="an empty list"),
    pytest.param(iter([]), "there is no sample", id="an empty generator"),
]


@pytest.mark.parametrize(("data", "words"), BAD)
def test_data_that_does_not_fit_is_refused(data: Any, words: str) -> None:
    with pytest.raises(InputsError) as caught:
        load_samples(data, TWO)
    assert words in str(caught.value)


def npy(shape: tuple[int, ...]) -> bytes:
    """The header of an npy file, and nothing after it."""
    stream = io.BytesIO()
    header = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()


def npz(member: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("image.npy", member)
    return stream.getvalue()


OBJECTS, HUGE = np.array([{"a": 1}], object), (10**6, 10**6)
WRONG = {"image": np.ones((2, 3), np.int32), "ids": np.arange(2)}
FILES: list[Any] = [
    pytest.param("no.npz", None, "no such file or folder", id="missing"),
    pytest.param("", None, "it holds no sample", id="empty folder"),
    pytest.param("/record.json", "{}", "name the folder of this model in it", id="a recording"),
    pytest.param("p.npz", {"image": OBJECTS}, "p.npz: it holds Python objects", id="pickled npz"),
    pytest.param("/image.npy", OBJECTS, "image.npy: it holds Python objects", id="pickled npy"),
    pytest.param("t.npz", npz(npy((2,)))[:50], "not an npz archive, or a truncated one", id="truncated npz"),
    pytest.param("/image.npy", npy((2, 3)), "it cannot be read", id="truncated npy"),
    pytest.param("/image.npy", npy(HUGE), "it cannot be read", id="npy that claims terabytes"),
    pytest.param("z.npz", npz(npy(HUGE)), "it cannot be read", id="npz that claims terabytes"),
    pytest.param("x.npz", npy((2,)), "not an npz archive", id="npy called npz"),
    pytest.param("/one.npz", WRONG, r"one.npz: input 'image': the model wants float32", id="a type"),
    pytest.param("x.npy", npy((2,)), "from a .npy file", id="one npy for two inputs"),
    pytest.param("f.json", "{", "f.json: it cannot be read", id="broken JSON"),
    pytest.param("f.json", "[" * 200_000, "recursion depth exceeded", id="JSON of nested lists"),
    pytest.param("f.json", "3", "sample 0: it cannot be read", id="JSON of a number"),
    pytest.param("f.json", "[]", "there is no sample", id="JSON of nothing"),
    pytest.param("f.json", '[{"image": [1, 2]}]', "sample 0: it cannot be read", id="JSON of plain lists"),
    pytest.param("f.json", '[{"image": {"array": "!!"}}]', "polygraphy.json.save_json", id="not base64"),
]


@pytest.mark.parametrize(("name", "content", "words"), FILES)
def test_files_that_cannot_be_read_are_named(name: str, content: Any, words: str, tmp_path: Path) -> None:
    """A name with a slash is read as a folder."""
    if content is not None:
        write(tmp_path, (name.strip("/"), content))
    with pytest.raises(InputsError) as caught:
        load_samples(tmp_path if "/" in name else tmp_path / name, TWO)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_mixture_of_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path, ("image.npy", ONES), ("one.npz", {"image": ONES}))
    with pytest.raises(InputsError, match=r"a mixture of \.npz files, \.npy files"):
        load_samples(tmp_path, TWO)


SEQUENCE = graphs.graph("g (seq(float[2]) s) => (float[N] y) { y = ConcatFromSequence<axis=0>(s) }")
ANY = graphs.graph("g (float[N,L] s) => (float[N,L] y) { y = Relu(s) }")
UNFIT: list[Any] = [
    pytest.param(SEQUENCE, ONES, "a sequence, map or optional", id="an array for a sequence"),
    pytest.param(SEQUENCE, [ONES, np.ones(3)], "a sequence, map or optional", id="a list for a sequence"),
    pytest.param(ANY, [[1.0, 2.0], [3.0]], "input 's': it is a list whose parts differ", id="ragged lists"),
]


@pytest.mark.parametrize(("model", "feed", "words"), UNFIT)
def test_values_that_are_no_tensor_are_refused(model: Model, feed: object, words: str) -> None:
    with pytest.raises(InputsError, match=words):
        load_samples({"s": feed}, model)


# -- random data -----------------------------------------------------------------------------
def first(model: Model, **options: Any) -> dict[str, Array]:
    return next(iter(random_samples(model, **options)))


def test_random_values_are_seeded_and_spread_as_their_type() -> None:
    same(random_samples(ONE, seed=5), list(random_samples(ONE, seed=5)))
    assert (first(ONE, seed=5)["x"] != first(ONE, seed=6)["x"]).any()
    source = random_samples(ONE, seed=3).source
    assert source.text == "random inputs, seed 3 (no real data was used; ranges may not be representative)"
    ports = ", ".join(f"float[N{i}] x{i}" for i in range(9))
    many = graphs.graph(f"g ({ports}) => (float[?] y) {{ y = Relu(x0) }}")
    assert "with N0 = 1, N1 = 1, N2 = 1, N3 = 1, 5 sizes more (" in random_samples(many).source.text
    assert (source.real, source.samples, source.spans["x"]) == (False, 1, ((2,), (2,), (2,)))
    body = "g (float[99,99] x, double[99,99] d, uint8[99,99] u) => (float[99,99] y) { y = Relu(x) }"
    feeds = first(graphs.graph(body))
    for name in "xd":
        assert abs(feeds[name].mean()) < 0.05 and feeds[name].std() == pytest.approx(1, abs=0.05)
    assert (feeds["u"].min(), feeds["u"].max()) == (0, 255)
    strings = graphs.graph("g (string[2] s) => (string[2] y) { y = Identity(s) }")
    for model, what in ((strings, "strings"), (SEQUENCE, "a sequence, map or optional")):
        for value in ({}, {"s": 1}):
            with pytest.raises(InputsError, match=f"input 's': it is {what}, which TensorRT lacks"):
                random_samples(model, input_values=value)


ROWS = ", ".join(["0"] * 28)
TABLE = f"<float[7,4] table = {{{ROWS}}}, int64[1] zero = {{0}}>"


@pytest.mark.parametrize(("lines", "rows"), graphs.cases("data/lookups.txt"))
@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_ids_stay_within_their_table(lines: str, rows: str, dtype: str) -> None:
    if dtype == "int32":
        lines = lines.replace("(ids)", "(ids64)").replace(", ids)", ", ids64)").replace("(ids,", "(ids64,")
        lines = "ids64 = Cast<to=7>(ids) " + lines
    model = graphs.graph(f"g ({dtype}[200] ids) => (float[?,?] y) {TABLE} {{ {lines} }}")
    ids = first(model)["ids"]
    assert set(ids.tolist()) == set(range(int(rows)))


@values
def test_other_integers_and_masks(ports: str, lines: str, value: float) -> None:
    model = graphs.graph(f"g ({ports}) => (float y) {TABLE} {{ {lines} }}")
    found = next(iter(first(model).values()))
    assert (found == value).all()


def shaped(*ports: str) -> Model:
    names = [p.split()[-1] for p in ports]
    body = " ".join(f"y{i} = Identity({n})" for i, n in enumerate(names))
    outs = ", ".join(f"float y{i}" for i in range(len(names)))
    return graphs.graph(f"g ({', '.join(ports)}) => ({outs}) {{ {body} }}")


@values
def test_free_dimensions(ports: list[str], given: Any, wanted: Any, words: str | None) -> None:
    samples = random_samples(shaped(*ports), input_shapes=given)
    assert {name: array.shape for name, array in next(iter(samples)).items()} == wanted
    assert words in samples.source.text if words else ", with" not in samples.source.text


@values
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


@pytest.mark.parametrize(("lines", "ports", "words"), graphs.cases("data/fitting.txt"))
def test_sizes_that_nobody_gave_are_such_that_the_model_runs(lines: str, ports: str, words: str) -> None:
    weights = "<float[6] r = {1, 2, 3, 4, 5, 6}, int64[2] s = {6, 1}, int64[4] pads = {0, 40, 0, 40}, "
    weights += "float[1,3,1,1] k = {1, 2, 3}, float many = {40}>"
    model = graphs.graph(f"g ({ports}) => (float y) {weights} {{ {lines} }}")
    assert words in load_samples(None, model).source.text


def test_values_for_inputs_without_a_file() -> None:
    model = graphs.graph("g (float[n,2] x, int64 sr, int64[k] size) => (float[n,2] y) { y = Relu(x) }")
    samples = load_samples(None, model, seed=3, input_values={"sr": 16000, "size": [20, 30]})
    feeds = next(iter(samples))
    assert (feeds["sr"].item(), feeds["size"].tolist()) == (16000, [20, 30])
    assert samples.source.options == {"seed": "3", "input-values": "sr=16000,size=20x30"}
    same(samples, list(load_samples(None, model, seed=3, input_values={"sr": 16000, "size": [20, 30]})))


@values
def test_values_that_an_input_does_not_take(values: dict[str, Any], words: str) -> None:
    model = graphs.graph("g (float[2,2] x, int64 sr) => (float[2,2] y) { y = Relu(x) }")
    with pytest.raises(InputsError, match=words):
        load_samples(None, model, input_values=values)


# -- the samples of a run --------------------------------------------------------------------
PROFILE = Deployment(profile={"image": ((1, 3), (5, 3), (8, 3)), "ids": ((1,), (5,), (8,))})


def test_without_data_there_is_one_random_sample_of_the_usual_shape() -> None:
    samples = load_samples(None, TWO, seed=4, deployment=PROFILE)
    same(samples, list(random_samples(TWO, seed=4, input_shapes={"image": (5, 3)})))
    assert not samples.source.real
    (note,) = load_samples(None, TWO, image_preprocess="size=8").notes
    assert note.startswith("`image-preprocess` is for a folder of photographs")


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
    with pytest.raises((InputsError, UsageError), match=words):
        load_samples(**given, model=TWO, deployment=profile)


ZEROS, NOISE = np.zeros((1, 4), np.float32), np.arange(4, dtype=np.float32)[None]
DOUBTS = [
    pytest.param([{"x": NOISE}], "", id="one sample"),
    pytest.param([{"x": NOISE}, {"x": NOISE + 1}], "", id="two samples"),
    pytest.param([{"x": ZEROS}], "constant samples", id="zeros"),
    pytest.param([{"x": ZEROS}, {"x": ZEROS + 1}], "constant samples", id="a constant each"),
    pytest.param([{"x": NOISE}, {"x": ZEROS}], "", id="silence among others"),
    pytest.param([{"x": NOISE}] * 3, "one sample, 3 times", id="one sample, repeated"),
]


@pytest.mark.parametrize(("feeds", "doubt"), DOUBTS)
def test_samples_that_prove_nothing_say_so(feeds: list[dict[str, Any]], doubt: str) -> None:
    model = graphs.graph("g (float[1,4] x) => (float[1,4] y) { y = Relu(x) }")
    assert load_samples(feeds, model).source.doubt == doubt


def test_a_constant_mask_beside_other_inputs_is_no_constant_sample() -> None:
    model = graphs.graph("g (float[1,4] x, float[1,4] mask, int64 n) => (float[1,4] y) { y = Mul(x, mask) }")
    sample = {"x": NOISE, "mask": ZEROS + 1, "n": np.array(3)}
    assert not load_samples([sample], model).source.doubt
    assert load_samples([sample | {"x": ZEROS}], model).source.doubt == "constant samples"


@values
def test_outputs_that_hold_nothing_prove_nothing(outputs: str, last: float, doubt: str, named: str) -> None:
    body = "p = Relu(x) i = NonZero(p) q = Abs(x) k = ArgMin<keepdims=0>(q)"
    model = graphs.graph(f"g (float[4] x) => {outputs} {{ {body} }}")
    samples = [{"x": np.array([-1, -2, -3, end], np.float32)} for end in (-1.0, last)]
    result = rewriter.fix(model, inputs=samples, build=False, target="10.13")
    assert result.data is not None and result.verified and result.data.doubt == doubt
    compared = rewriter.verify(model, result.model, inputs=samples, engine="emulation")
    assert compared.passed and compared.data.doubt == doubt
    assert rewriter.scan(model, inputs=samples).data.doubt == doubt
    for warnings in (result.warnings, compared.warnings):
        notes = [text for text in warnings if text.startswith("no proof")]
        assert notes == ([f"no proof on these samples: {named}"] if named else [])
