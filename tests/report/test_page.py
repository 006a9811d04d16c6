"""Pages as text: self-contained, safe against hostile names, small; and the command line that writes them."""

import base64
import hashlib
import json
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pages
import pytest
from graphs import with_weights
from markupsafe import escape
from pages import HOSTILE
from tables import values
from typer.testing import CliRunner

from rewriter.api import fix
from rewriter.cli import app
from rewriter.ir.plan import Decision, Plan, Range
from rewriter.jobs.fix.before import Emulated, SideBySide
from rewriter.jobs.fix.result import End
from rewriter.passes.base import Change, Refusal
from rewriter.pipeline.driver import PassResult
from rewriter.report import html
from rewriter.report.checks import judging_check
from rewriter.report.html import nodes_of
from rewriter.report.html.depth import MOST, decades, logarithmic
from rewriter.report.html.graphs import cause_graphs
from rewriter.report.html.outputs import boxes_of, form_of, pictures_section, png, words_of
from rewriter.runtime.metrics.pairwise_error import Pair
from rewriter.runtime.metrics.pictures import picture_of
from rewriter.runtime.ranges import TensorAtDepth
from rewriter.verification.verdict import Verdict

LIMIT = 2_000_000  # bytes of a page


def test_the_policy_admits_the_page_s_own_script_and_style_only() -> None:
    text = html.as_html(pages.fixed())
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    assert "default-src 'none'" in policy.replace("&#39;", "'")
    for kind in ("script", "style"):
        (body,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.S)
        assert base64.b64encode(hashlib.sha256(body.encode()).digest()).decode() in policy
    assert "unsafe" not in policy
    found = _Attributes()
    found.feed(text)
    assert not any(name.startswith("on") or name == "style" for name, _ in found.all)
    links = [value for name, value in found.all if name in ("href", "src", "action", "srcset")]
    assert links and all(link.startswith(("data:", "#")) for link in links)


class _Attributes(HTMLParser):
    """Collects the attributes of all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.all += [(name, value or "") for name, value in attrs]


@pytest.mark.parametrize("result", [pages.fixed, pages.scanned, pages.located])
def test_a_hostile_name_is_text(result: object) -> None:
    text = html.as_html(result(), f"rewriter fix '{HOSTILE}'")  # type: ignore[operator]
    assert "window.hacked" in text
    assert "<script>window" not in text and "<img src=x" not in text


def test_words_between_backticks_are_code_and_names_with_one_are_text() -> None:
    warnings = ["use `rewriter verify <x>` there", "node a`b is odd"]
    text = html.as_html(replace(pages.fixed(), warnings=warnings))
    assert "use <code>rewriter verify &lt;x&gt;</code> there" in text
    assert "node a`b is odd" in text


def _large(nodes: int) -> object:
    """A result with as many nodes as RT-DETR or more, names as its exporter writes them, many hazards."""
    name = "/model/decoder/decoder/layers.{0}/cross_attn/sampling_offsets/{1}/MatMul".format
    names = [name(i % 6, i) for i in range(nodes)]
    measured = [Range(-(10.0 ** (i % 12 - 6)), 1.0, 1e-3, finite=True) for i in range(nodes)]
    depth = tuple(
        TensorAtDepth(i, f"{n}_output_0", n, "MatMul", f"0:{n}_output_0", measured[i])
        for i, n in enumerate(names)
    )
    reason = "the FP16 product before it then sums in FP32, at no cost: {0}".format
    decisions = tuple(
        Decision(t.node, t.op, t.key, "overflow", reason(t.tensor), t.tensor, t.range) for t in depth[::3]
    )
    passes = [
        PassResult(
            "fuse-attention",
            tuple(Change(n, f"{n} became one MatMul") for n in names[::2]),
            tuple(Refusal(n, "it has two readers") for n in names[1::2]),
            1.0,
        )
    ]
    return replace(
        pages.fixed(), depth=depth, plan=Plan("fp16", decisions=decisions, float_nodes=nodes), passes=passes
    )


@pytest.mark.parametrize("nodes", [2500, 30_000])
def test_a_page_of_a_large_network_stays_small(nodes: int) -> None:
    text = html.as_html(_large(nodes))
    assert len(text.encode()) < LIMIT
    (data,) = re.findall(r'class="depth-data">(.*?)</script>', text, re.S)
    rows = json.loads(data)["rows"]
    assert min(nodes, MOST // 4) <= len(rows) <= MOST
    assert any(row[6].startswith("[-1e+05, ") for row in rows), "the widest tensor is drawn"


def test_the_depth_holds_every_tensor_in_its_place() -> None:
    depth = pages.fixed().depth
    results = [tensor for tensor in depth if not tensor.constant]
    assert [t.tensor for t in results[:3]] == ["c0", "t0", "c1"]
    assert [t.depth for t in results] == list(range(len(results)))
    far = next(t for t in results if t.tensor == "far")
    assert far.range.absmax > 65504 and far.node == "/body/far"
    weight = next(t for t in depth if t.tensor == "w1")
    assert weight.constant and weight.depth == next(t.depth for t in results if t.tensor == "c1")


def test_the_page_of_fix_says_what_was_wrong_and_how_far_off_it_was() -> None:
    result = pages.fixed()
    text = html.as_html(result)
    assert result.causes and all(str(escape(str(cause))) in text for cause in result.causes)
    assert "NaN or infinity in plain FP16, now" in text and "Before" in text


def test_the_page_of_a_failure_begins_with_limit_remedy_and_the_nodes() -> None:
    done = pages.fixed()
    checks = [
        replace(check, passed=False, details=("adds 0.02: /body/c1 (Conv)",))
        if check.name == "emulation"
        else check
        for check in done.checks
    ]
    failed = replace(done, verdict=Verdict(tuple(checks)), end=End("failed"))
    ended, text = failed.conclusion, html.as_html(failed)
    head = text[: text.index("<nav")]
    texts = (ended.limit, "and build it with TF32 off", "adds 0.02: /body/c1 (Conv)")
    places = [head.index(words) for words in texts]
    assert places == sorted(places)
    assert 'class="verdict bad"' in head and 'class="loud"' not in html.as_html(done)


def test_verify_names_the_command_that_finds_the_cause_of_a_failure() -> None:
    done = pages.verified()
    wrong = Verdict(tuple(replace(check, passed=False) for check in done.checks))
    failed = replace(done, verdict=wrong, original=Path("a.onnx"), fixed=Path("b.onnx"))
    text = re.sub("<[^>]*>", "", html.as_html(failed))
    assert "Finds the tensor that goes wrong first" in text and "rewriter locate a.onnx b.onnx" in text


def test_a_graph_shows_the_neighbours_of_a_cause_with_types_and_ranges() -> None:
    (graph,) = cause_graphs(pages.fixed(), nodes_of(pages.fixed()))
    kinds = {title.partition(" (")[0]: kind for *_, title, kind, _ in graph.boxes}
    assert kinds["/body/far"] == "fp32" and kinds["/body/t4"] == "fp16" and len(kinds) <= 10
    wide = [(float(text), cast) for *_, text, beyond, cast in graph.edges if beyond]
    assert wide and all(reach > 65504 and not cast for reach, cast in wide)
    assert any(cast for *_, cast in graph.edges)
    rows = {title.partition(" (")[0]: y for _, y, _, _, title, *_ in graph.boxes}
    assert rows["/body/t4"] < rows["/body/far"] < rows[HOSTILE] < rows["/body/y"]


def test_errors_along_the_depth_are_of_the_plain_and_the_fixed_model() -> None:
    text = html.as_html(pages.fixed())
    assert 'class="curve plain"' in text and 'class="curve fixed"' in text
    assert "Plain FP16 has an error above 0.1 from /body/far on" in text


def _side(**outputs: tuple[np.ndarray, np.ndarray, np.ndarray]) -> SideBySide:
    image = {"image": np.linspace(0, 1, 3 * 32 * 64, dtype=np.float32).reshape(1, 3, 32, 64)}
    was, plain, fixed = ({name: trio[i] for name, trio in outputs.items()} for i in range(3))
    return SideBySide(0, image, was, Emulated("Plain FP16", plain), Emulated("Fixed", fixed))


def test_boxes_of_a_detector_are_drawn_on_its_input() -> None:
    corners = np.array([[[8, 4, 24, 20], [0, 0, 2, 2]]], np.float32)
    centres = np.array([[[0.6, 0.6, 0.25, 0.5], [0.03, 0.03, 0.03, 0.03]]], np.float32)
    scores = np.array([[[0.1, 0.9], [0.2, 0.1]]], np.float32)
    for boxes, first in ((corners, (8.0, 4.0, 16.0, 16.0)), (centres, (30.4, 11.2, 16.0, 16.0))):
        side = _side(boxes=(boxes, boxes * np.float32(np.nan), boxes), scores=(scores, scores, scores))
        found = boxes_of("boxes", side)
        assert found is not None and [kind for kind, _ in found.rows] == ["was", "plain", "fixed"]
        assert found.rows[0][1][0] == first and not found.rows[1][1]
        assert boxes_of("scores", side) is None


def test_the_best_classes_and_tokens_of_every_model() -> None:
    was, off = np.eye(12, dtype=np.float32)[None, :4], np.eye(12, dtype=np.float32)[None, 1:5]
    rows = words_of("logits", _side(logits=(was, off, was)))
    assert rows[0] == ("Original", [("0", True), ("1", True), ("2", True), ("3", True)])
    assert rows[1] == ("Plain FP16", [("1", False), ("2", False), ("3", False), ("4", False)])
    assert rows[2][1] == rows[0][1]
    tokens = np.array([[7, 8]])
    assert words_of("ids", _side(ids=(tokens, tokens + np.array([0, 1]), tokens)))[1][1] == [
        ("7", True),
        ("9", False),
    ]


WAVE = np.sin(np.arange(4000) / 20).astype(np.float32)[None]
IDS = np.array([[5, 6, 7, 8]])
MAP = np.repeat(np.arange(4), 128).reshape(1, 16, 32)
LOGITS = np.eye(5, dtype=np.float32)[MAP].transpose(0, 3, 1, 2)
FOUND: dict[str, np.ndarray] = {
    "boxes": np.array([[[0, 0, 9, 9], [9, 9, 20, 20]]], np.float32),
    "scores": np.array([[0.9, 0.2]], np.float32),
}


@pytest.mark.parametrize(
    ("array", "scores", "title"),
    [
        pytest.param(WAVE, False, "Waveform", id="a waveform"),
        pytest.param(WAVE[:, None], False, "Waveform", id="a waveform with a channel"),
        pytest.param(LOGITS, False, "Class of each pixel", id="scores of pixels"),
        pytest.param(MAP, False, "Class of each pixel", id="classes of pixels"),
        pytest.param(IDS, False, "Text ids", id="text ids"),
        pytest.param(IDS[:, 0], False, "Classes", id="a class for each image"),
        pytest.param(WAVE[:, :10], True, "Best classes", id="scores"),
        pytest.param(LOGITS[:, :, 0], True, "Best text id of each position", id="scores of text"),
        pytest.param(WAVE[:, :10], False, "", id="features"),
        pytest.param(np.random.default_rng(0).normal(size=(1, 2048)).astype("f"), False, "", id="embedding"),
        pytest.param(np.full((1, 64, 5, 5), 0.5, np.float32), False, "", id="features of an image"),
    ],
)
def test_an_output_has_the_form_of_its_task(array: np.ndarray, scores: bool, title: str) -> None:
    assert form_of("y", _side(y=(array, array, array)), scores).title == title


def test_numbers_beside_boxes_are_their_classes_and_their_count() -> None:
    numbers: dict[str, np.ndarray] = {"labels": np.array([[3, 1]]), "number": np.array([[2]]), "ids": IDS}
    numbers |= {"logits": np.zeros((1, 2, 9), np.float32)}
    side = _side(**{name: (a, a, a) for name, a in (FOUND | numbers).items()})
    titles = {name: form_of(name, side, name in ("scores", "logits")).title for name in side.expected}
    assert titles["boxes"] == "Boxes with the highest scores"
    assert (titles["labels"], titles["number"]) == ("Classes of the boxes", "Number of detections")
    assert (titles["ids"], titles["scores"], titles["logits"]) == ("Text ids", "", "Best class of each box")


def test_a_mask_shows_the_pixels_of_another_class() -> None:
    other = np.where(MAP == 3, 2, MAP)
    images = form_of("y", _side(y=(MAP, other, other)), False).images
    assert [image.caption for image in images][:3] == ["Original in FP32", "Plain FP16", "Fixed"]
    assert images[-1].caption == "25 % of the pixels have another class in the fixed model"


def test_tokens_of_a_model_without_an_image_are_no_picture() -> None:
    check = judging_check(pages.fixed().checks)
    assert check is not None and check.pictures
    (one,), (picture,) = [c for c in check.outputs if not c.of], check.pictures
    check = replace(check, outputs=(replace(one, name="y"),), pictures=(replace(picture, name="y"),))
    tokens = np.zeros((1, 32, 32), np.float32)
    side = _side(y=(tokens, tokens, tokens))
    assert list(pictures_section(check, side))
    assert not list(pictures_section(check, replace(side, inputs={"ids": IDS})))


def test_the_graph_of_a_cause_boxes_the_node_that_goes_wrong() -> None:
    """Not the Mul before it, although its values are larger."""
    body = """g (float[1,8] x, float[8,64] w, float c, int64[1] k) => (float[1,5] v, int64[1,5] i) {
        m = MatMul(x, w) large = Mul(m, c) small = Div(large, c) v, i = TopK(small, k) }"""
    rng = np.random.default_rng(0)
    weights: dict[str, np.ndarray] = {"w": rng.normal(size=(8, 64)).astype(np.float32)}
    weights |= {"c": np.array(900, np.float32), "k": np.array([5])}
    result = fix(with_weights(body, weights), build=False, inputs={"x": np.ones((1, 8), np.float32)})
    causes = {cause.kind: cause for cause in result.causes}
    assert causes["order"].centre.startswith("TopK") and len(causes["order"].nodes) > 1
    graphs = {graph.title: graph for graph in cause_graphs(result, nodes_of(result))}
    assert [box[2] for box in graphs[str(causes["order"])].boxes if box[-1]] == ["TopK"]


def test_a_waveform_is_drawn_for_each_model() -> None:
    wave = form_of("y", _side(y=(WAVE, WAVE * np.float32(np.nan), WAVE)), False).wave
    assert wave is not None and [kind for kind, _ in wave.lines] == ["was", "plain", "fixed"]
    assert wave.lines[0][1] == wave.lines[2][1] != wave.lines[1][1]


def test_the_worst_sample_is_called_by_its_file(tmp_path: Path) -> None:
    for name, scale in (("a", 1.0), ("night", 3.0), ("z", 0.5)):
        np.savez(tmp_path / f"{name}.npz", x=np.float32(scale) * pages.samples()["x"])
    done = fix(pages.network().proto, build=False, inputs=tmp_path)
    assert done.data is not None and done.data.names == tuple(
        str(tmp_path / f"{name}.npz") for name in ("z", "a", "night")
    )
    (figures,) = judging_check(done.checks).statistics  # type: ignore[union-attr]
    worst = Path(done.data.names[figures.sample]).name
    assert f"<li>in sample {worst}</li>" in html.as_html(done)


def test_the_chart_marks_the_tensor_that_overflows() -> None:
    text = html.as_html(pages.fixed())
    assert re.search(r'class="dot hazard" d="M\d', text)
    assert "exceed 65504" in text


def test_checks_hold_the_figures_and_the_picture_of_their_worst_sample() -> None:
    verdict = pages.fixed().verdict
    assert verdict is not None
    (emulation,) = [check for check in verdict.checks if check.name == "emulation"]
    (figures,), (picture,) = emulation.statistics, emulation.pictures
    assert figures.relative_l2 == emulation.outputs[0].relative_l2
    assert picture.largest == pytest.approx(figures.max_abs)
    assert picture.expected.shape == (32, 32, 3) and picture.difference.max() == 255


def test_a_picture_with_nan_shows_where() -> None:
    expected, actual = np.zeros((1, 1, 16, 16), np.float32), np.zeros((1, 1, 16, 16), np.float32)
    expected[0, 0, 0, 0], actual[0, 0, 3, 4] = 1.0, np.nan
    picture = picture_of("y", Pair(expected, actual))
    assert picture is not None and np.argwhere(picture.difference).tolist() == [[0, 0], [3, 4]]


def test_a_png_holds_its_pixels() -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    data = png(pixels)
    size = int.from_bytes(data[33:37], "big")
    assert data[37:41] == b"IDAT"
    rows = np.frombuffer(zlib.decompress(data[41 : 41 + size]), np.uint8).reshape(2, 10)
    assert (rows[:, 1:].reshape(2, 3, 3) == pixels).all() and not rows[:, 0].any()


def test_scales_keep_their_ends_and_marks_are_round() -> None:
    scale = logarithmic(1e-4, 1.0, 100.0, 0.0)
    assert [scale(v) for v in (0.0, 1e-4, 1e-2, 1.0, float("inf"), float("nan"))] == [100, 100, 50, 0, 0, 0]
    assert decades(3e-5, 2.0, 9) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """A model and its samples."""
    onnx.save(pages.network().proto, tmp_path / "model.onnx")
    np.savez(tmp_path / "data.npz", **pages.samples())  # type: ignore[arg-type]
    return tmp_path / "model.onnx", tmp_path / "data.npz"


def test_the_suffix_chooses_page_or_json(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = map(str, files)
    for name in ("report.html", "report.json"):
        arguments = ["scan", model, "--inputs", data, "--report", str(tmp_path / name)]
        assert CliRunner().invoke(app, arguments).exit_code == 0
    assert json.loads((tmp_path / "report.json").read_text())["findings"]
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!doctype html>") and "Repeats this run" in page


@pytest.mark.parametrize("verb", ["fix", "scan", "verify", "locate"])
def test_saved_json_gives_the_page_of_the_command(
    verb: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    model, data = map(str, files)
    more = {
        "fix": ["--dry-run", "--no-build"],
        "verify": [model, "--engine", "onnxruntime"],
        "scan": [],
        "locate": [model, "--engine", "onnxruntime"],
    }[verb]
    saved, page, again = (str(tmp_path / name) for name in ("run.json", "run.HTML", "again.html"))
    outputs = ["--json", saved, "--report", page, "-q"]
    done = CliRunner().invoke(app, [verb, model, *more, "--inputs", data, *outputs])
    assert done.exit_code == 0 and f"rewriter {verb}" in Path(page).read_text(), done.output
    assert CliRunner().invoke(app, ["report", saved, "-o", again]).exit_code == 0
    assert Path(again).read_text() == Path(page).read_text()
    assert verb != "fix" or "data-depth" in Path(again).read_text()


@values
def test_a_saved_page_that_was_changed_is_an_error(page: dict[str, Any], tmp_path: Path) -> None:
    body = {"template": "table.html", "values": {}}
    section = {"id": "a", "title": "A", "lead": "", "bodies": [body | page.get("sections", [{}])[0]]}
    whole: dict[str, Any] = {
        "verb": "fix",
        "subject": None,
        "verdict": "v",
        "state": "good",
        "rows": [],
        "links": {},
    }
    content = page if "verb" in page else whole | {"sections": [section]}
    (tmp_path / "run.json").write_text(json.dumps({"schema_version": 1, "page": content}))
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run.json"), "-o", str(tmp_path / "run.html")])
    assert done.exit_code == 2 and f"error: {tmp_path / 'run.json'}: " in done.stderr
    assert not (tmp_path / "run.html").exists()


@pytest.mark.parametrize(
    "text", ["no JSON", "[]", "{}", '{"passed": true, "schema_version": 1}', '{"passed": 1}']
)
def test_a_page_of_what_is_no_report_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run.json"), "-o", str(tmp_path / "run.html")])
    assert done.exit_code == 2 and f"error: {tmp_path / 'run.json'}: it " in done.stderr
    assert not (tmp_path / "run.html").exists()
    (tmp_path / "run.json").unlink()
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run.json"), "-o", str(tmp_path / "run.html")])
    assert "cannot be read: No such file" in done.stderr
