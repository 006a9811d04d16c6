"""Configuration: where options come from, in which order, and what is refused with which words."""

import inspect
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from command_lines import quick
from graphs import cases, graph
from paths import DOCS
from tables import values

from rewriter import api
from rewriter.base.errors import UsageError
from rewriter.cli import loaded as loaded_command
from rewriter.ir.model import save
from rewriter.pipeline.config import Configuration, load
from rewriter.pipeline.options import COMMANDS, JOBS, KEYS, Command, FixOptions, ScanOptions
from rewriter.pipeline.presets import OTHERWISE
from rewriter.pipeline.schema import Names, Paths, Shapes, Text, declarations, read, to_text


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variables of the developer's, and a folder of its own."""
    for name in [name for name in os.environ if name.startswith("REWRITER_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def pyproject(folder: Path, text: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(f"[project]\nname = 'x'\n\n[tool.rewriter]\n{text}", encoding="utf-8")
    return path


def own(folder: Path, text: str) -> Path:
    path = folder / "rewriter.toml"
    path.write_text(text, encoding="utf-8")
    return path


def loaded(near: Path, **variables: str) -> Configuration:
    return load(near, variables)


# -- one declaration
@pytest.mark.parametrize("command", JOBS)
def test_the_command_has_every_option_that_is_not_for_python_alone(command: Command) -> None:
    flags = {flag for parameter in loaded_command(command).params for flag in parameter.opts}
    options = declarations(COMMANDS[command]).values()
    assert {o.flag for o in options if "command line" in o.set_in} <= flags
    alone = {o.name for o in options if o.set_in == ("python",)}
    assert alone <= {"build", "timing", "ranges", "hazards", "page"}


def test_options_may_be_given_as_a_whole_and_replaced_by_keywords(model: Path) -> None:
    whole = FixOptions(passes="clean-casts", verify=False)
    assert api.fix(model, options=whole).pipeline == "clean-casts"
    assert api.fix(model, options=whole, passes="simplify").pipeline == "simplify"
    with pytest.raises(UsageError, match=r"(?s)`passess`.*`passes`"):
        api.fix(model, passess="simplify")


def test_the_docstring_of_fix_explains_every_option() -> None:
    text = inspect.getdoc(api.fix) or ""
    assert all(f"    {name}: " in text for name in declarations(FixOptions))


def test_what_presets_decide_has_no_default_of_its_own() -> None:
    assert all(KEYS[name].default is None for name in OTHERWISE)


# -- values
@values
def test_reads_a_file(tmp_path: Path, text: str, name: str, value: object) -> None:
    own(tmp_path, text)
    resolved = loaded(tmp_path).resolve()
    assert resolved.values[name] == value
    assert resolved.sources[name].named(name) == "rewriter.toml"
    assert resolved.arguments("fix") == {name: value}


TEXTS = [
    ("REWRITER_PRESET", "accurate", "accurate"),
    ("REWRITER_SKIP", "simplify, rescale", ("simplify", "rescale")),
    ("REWRITER_OPSET", "18", 18),
    ("REWRITER_TOLERANCE", "1e-3", 1e-3),
    ("REWRITER_STRICT", "1", True),
    ("REWRITER_VERIFY", "Off", False),
    ("REWRITER_INPUT_SHAPES", "x:1x3,a:b:", {"x": (1, 3), "a:b": ()}),
    ("REWRITER_INPUT_VALUES", "sr=16000,s=20x1.5", {"sr": 16000, "s": [20, 1.5]}),
    ("REWRITER_INPUTS", "data.npz", Path("data.npz")),
    ("REWRITER_IO", "fp32", "fp32"),
    ("REWRITER_PLUGIN_LIB", "a.so, b.so", (Path("a.so"), Path("b.so"))),
]


@pytest.mark.parametrize(("variable", "text", "value"), TEXTS)
def test_reads_the_environment(tmp_path: Path, variable: str, text: str, value: object) -> None:
    resolved = loaded(tmp_path, **{variable: text}).resolve()
    (name,) = [name for name, key in KEYS.items() if key.variable == variable]
    assert resolved.values[name] == value
    assert resolved.sources[name].named(name) == f"environment ({variable})"


def test_a_slip_in_a_variable_is_an_error_and_a_strange_one_a_warning(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="REWRITER_PRESETT") as caught:
        loaded(tmp_path, REWRITER_PRESETT="accurate")
    assert caught.value.hint == "did you mean 'REWRITER_PRESET'?"
    (warning,) = loaded(tmp_path, REWRITER_HOME="x", REWRITER_CACHE="y").warnings
    assert warning.startswith("REWRITER_HOME sets nothing")


def test_an_empty_variable_sets_nothing(tmp_path: Path) -> None:
    assert loaded(tmp_path, REWRITER_PRESET=" ").resolve().arguments("fix") == {}


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.key)
def test_every_key_reads_from_a_text(key: Any) -> None:
    examples = {bool: "true", int: "3", float: "0.5", Path: "x", Shapes: "x:1x2"}
    examples |= {Names: "a,b", Paths: "a.so,b.so", dict: "x=1"}
    named = {
        "preset": "accurate",
        "passes": "simplify",
        "add": "simplify",
        "skip": "simplify",
        "target": "10.3",
    }
    named |= {"metric": "psnr", "image_preprocess": "size=640", "io": "fp16", "plugin_types": "A:fp16;B:fp32"}
    text = named.get(key.name) or examples.get(key.kind, getattr(key.kind, "__args__", "x")[0])
    assert read(key, Text(text)) not in (None, "")


@pytest.mark.parametrize("key", KEYS.values(), ids=lambda key: key.key)
def test_what_the_shell_offers_is_accepted(key: Any) -> None:
    assert all(read(key, Text(name)) for name in key.choices())


SHOWN = [
    (None, "-"),
    ((), "-"),
    (True, "true"),
    (("a", "b"), '["a", "b"]'),
    (Path("a/b"), '"a/b"'),
    ({"x": (1, 3), "a:b": ()}, '{ x = [1, 3], "a:b" = [] }'),
]


@pytest.mark.parametrize(("value", "text"), SHOWN)
def test_shows_values_as_a_file_would_have_them(value: object, text: str) -> None:
    assert to_text(value) == text


# -- files
def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "models" / "deep").mkdir(parents=True)
    pyproject(tmp_path, 'inputs = "data/a.npz"\nreport = "/tmp/r.json"\n')
    values = loaded(tmp_path / "models" / "deep").resolve().values
    assert values["inputs"] == tmp_path / "data" / "a.npz"
    assert values["report"] == Path("/tmp/r.json")


@values
def test_of_files_in_several_folders_one_counts(tmp_path: Path, above: str, below: str, opset: int) -> None:
    (tmp_path / "models").mkdir()
    own(tmp_path, above)
    (tmp_path / "models" / "pyproject.toml").write_text(below)
    assert loaded(tmp_path / "models").resolve().arguments("fix") == {"opset": opset}


def test_of_two_files_in_a_folder_one_is_read_and_the_other_told(tmp_path: Path) -> None:
    pyproject(tmp_path, "opset = 18\n")
    own(tmp_path, "opset = 19\n")
    configuration = loaded(tmp_path)
    assert configuration.resolve().values["opset"] == 19
    assert configuration.warnings == (
        "pyproject.toml [tool.rewriter] is not read: rewriter.toml beside it comes first",
    )


def test_a_path_with_dots_is_searched_from_where_it_leads(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        own(tmp_path / folder, f"seed = {ord(folder)}\n")
    assert load(Path("a", "..", "b"), {}).resolve().values["seed"] == ord("b")


def test_the_search_ends_at_the_root_of_the_repository(tmp_path: Path) -> None:
    own(tmp_path, "seed = 7\n")
    (tmp_path / "repository" / "src").mkdir(parents=True)
    assert loaded(tmp_path / "repository" / "src").resolve().values["seed"] == 7
    (tmp_path / "repository" / ".git").touch()  # a file, as in a worktree
    assert loaded(tmp_path / "repository" / "src").file is None
    own(tmp_path / "repository", "seed = 8\n")
    assert loaded(tmp_path / "repository" / "src").resolve().values["seed"] == 8


HOSTILE = [
    pytest.param('plugin-lib = ["evil.so"]\n', id="plugin-lib"),
    pytest.param('metric = "evil.py:f"\ntolerance = 1.0\n', id="metric"),
    pytest.param('report = "../target.json"\n', id="report"),
]


@pytest.mark.parametrize("name", ["rewriter.toml", "pyproject.toml"])
def test_a_file_beside_a_model_runs_and_writes_nothing(tmp_path: Path, model: Path, name: str) -> None:
    """A downloaded folder, and a user who works elsewhere."""
    folder, marker = tmp_path / "downloaded", tmp_path / "marker"
    folder.mkdir()
    model.rename(folder / "m.onnx")
    text = "".join(str(case.values[0]) for case in HOSTILE)
    (folder / name).write_text(text if name == "rewriter.toml" else f"[tool.rewriter]\n{text}")
    (folder / "evil.so").write_text("no library")
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\ndef f(a, b): return 0.0\n")
    code, _, error = quick("fix", folder / "m.onnx", "--dry-run", "--no-build")
    assert code == 0, error
    assert not marker.exists() and not (tmp_path / "target.json").exists()
    assert ("rewriter.toml is not read" in error.replace("\n", "")) == (name == "rewriter.toml")


@pytest.fixture
def another(monkeypatch: pytest.MonkeyPatch) -> None:
    """All files belong to another user than the one who runs this."""
    if not hasattr(os, "geteuid"):
        pytest.skip("files of Windows do not say whose they are")
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)


@pytest.mark.usefixtures("another")
@pytest.mark.parametrize("text", HOSTILE)
def test_another_user_s_file_may_neither_load_code_nor_write_files(tmp_path: Path, text: str) -> None:
    path = own(tmp_path, text)
    key = text.split()[0]
    with pytest.raises(
        UsageError, match=f"key '{key}': it .*, and the file belongs to another user"
    ) as caught:
        loaded(tmp_path)
    assert f"give `{key}` on the command line" in caught.value.hint
    (tmp_path / "evil.so").touch()
    assert loaded(tmp_path, REWRITER_CONFIG=str(path)).resolve().arguments("fix") | {"report": 1}
    path.write_text('metric = "psnr"\nseed = 3\n')
    assert loaded(tmp_path).resolve().values["seed"] == 3, "other keys hold"


@pytest.mark.usefixtures("another")
def test_another_user_s_file_above_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own(tmp_path, "nonsense = 1\n")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    configuration = loaded(tmp_path / "here")
    assert configuration.file is None
    assert configuration.resolve().arguments("fix") == {}
    (warning,) = configuration.warnings
    assert warning == (
        f"{tmp_path / 'rewriter.toml'} is not read: it belongs to another user (REWRITER_CONFIG can name it)"
    )


def test_keys_that_write_or_load_hold_in_the_user_s_own_file(tmp_path: Path) -> None:
    own(tmp_path, 'plugin-lib = ["a.so"]\nmetric = "m.py:f"\nreport = "r.json"\n')
    assert set(loaded(tmp_path).resolve().arguments("fix")) == {"plugin_lib", "metric"}
    assert loaded(tmp_path).resolve().values["report"] == tmp_path / "r.json"


def test_a_variable_names_another_file_or_none(tmp_path: Path) -> None:
    own(tmp_path, "seed = 1\n")
    (tmp_path / "other.toml").write_text("seed = 2\n")
    other = loaded(tmp_path, REWRITER_CONFIG="other.toml")
    assert other.resolve().values["seed"] == 2
    assert loaded(tmp_path, REWRITER_CONFIG="none").resolve().values["seed"] == 0
    with pytest.raises(UsageError, match=r"REWRITER_CONFIG: there is no file gone\.toml"):
        loaded(tmp_path, REWRITER_CONFIG="gone.toml")


# -- precedence
def test_the_order_of_the_sources(tmp_path: Path) -> None:
    pyproject(tmp_path, 'preset = "accurate"\nopset = 18\nio = "fp16"\nseed = 1\n')
    resolved = loaded(tmp_path, REWRITER_OPSET="19", REWRITER_IO="fp32").resolve(io="keep", skip=[])
    told = {name: (resolved.values[name], resolved.sources[name].named(name)) for name in KEYS}
    assert told["io"] == ("keep", "command line")
    assert told["opset"] == (19, "environment (REWRITER_OPSET)")
    assert told["seed"] == (1, "pyproject.toml [tool.rewriter]")
    assert told["max_latency_cost"] == (0.16, "preset accurate")
    assert told["accumulation"] == ("fp16", "preset accurate")
    assert told["build"] == (True, "default")
    assert told["skip"] == ((), "default")


def test_a_preset_puts_the_passes_of_later_sources_out_of_force(tmp_path: Path) -> None:
    own(tmp_path, 'passes = "clean-casts"\n')
    configuration = loaded(tmp_path, REWRITER_PRESET="structure-only")
    assert configuration.resolve().arguments("fix") == {"preset": "structure-only"}
    assert configuration.resolve().ignored == (
        "rewriter.toml, key 'passes' is not used: REWRITER_PRESET takes its place",
    )
    assert configuration.resolve(passes="simplify").values["passes"] == "simplify"


@pytest.mark.parametrize(
    ("text", "own_options", "arguments"),
    [
        pytest.param(
            'keep-fp32 = ["*"]\ntolerance = 1e-3\nio = "fp16"\nseed = 3',
            {"plan": Path("plan.json")},
            {"plan": Path("plan.json"), "seed": 3},
            id="a plan",
        ),
        pytest.param("tolerance = 1e-3", {"max_latency_cost": 0.05}, {"max_latency_cost": 0.05}, id="budget"),
        pytest.param("max-latency-cost = 0.1", {"tolerance": 1e-4}, {"tolerance": 1e-4}, id="a tolerance"),
        pytest.param(
            'inputs = "a.npz"', {"input_shapes": {"x": (1,)}}, {"input_shapes": {"x": (1,)}}, id="shapes"
        ),
        pytest.param("input-values = { x = 1 }", {"inputs": "a.npz"}, {"inputs": "a.npz"}, id="samples"),
    ],
)
def test_some_options_put_others_of_later_sources_out_of_force(
    tmp_path: Path, text: str, own_options: dict[str, Any], arguments: dict[str, Any]
) -> None:
    own(tmp_path, text)
    assert loaded(tmp_path).resolve(**own_options).arguments("fix") == arguments


def test_passes_and_preset_of_one_file_go_together(tmp_path: Path) -> None:
    own(tmp_path, 'passes = "clean-casts"\npreset = "trt-bf16"\n')
    assert set(loaded(tmp_path).resolve().arguments("fix")) == {"passes", "preset"}


@values
def test_scan_has_the_precision_of_the_preset(tmp_path: Path, preset: str, precision: str | None) -> None:
    own(tmp_path, f'preset = "{preset}"\nopset = 18\nfail-on = "error"\n')
    resolved = loaded(tmp_path).resolve()
    assert resolved.arguments("scan").get("precision") == precision
    assert set(resolved.arguments("scan")) <= set(declarations(ScanOptions))
    assert resolved.values["fail_on"] == "error"


# -- errors
@pytest.mark.parametrize(("text", "message", "hint"), cases("pipeline/refused.txt"))
def test_refuses_and_names_the_file(tmp_path: Path, text: str, message: str, hint: str) -> None:
    own(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path)
    first, rest = str(caught.value).split("\n", 1)
    assert first.startswith("rewriter.toml") and message in first
    assert hint in rest


def test_errors_in_a_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("tool.rewriter = 3\n")
    with pytest.raises(UsageError, match=r"pyproject\.toml: tool\.rewriter is not a table"):
        loaded(tmp_path)
    pyproject(tmp_path, "opsett = 1\n")
    with pytest.raises(UsageError, match=r"^pyproject\.toml \[tool\.rewriter\]: unknown key 'opsett'"):
        loaded(tmp_path)


@values
def test_refuses_and_names_the_variable(tmp_path: Path, variable: str, text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        loaded(tmp_path, **{variable: text})
    assert caught.value.source == variable and hint in caught.value.hint


# -- the command line
@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(graph("g (float[2,8] x) => (float[2,8] y) { y = Sigmoid(x) }"), tmp_path / "m.onnx")


def test_fix_is_configured(model: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.ones((2, 8), np.float32))
    pyproject(
        tmp_path,
        'passes = "upgrade-opset"\nopset = 18\ninputs = "data.npz"\nreport = "r.json"\nbuild = false',
    )
    code, out, error = quick("fix", model, "-o", tmp_path / "f.onnx", "-v")
    assert code == 0, error
    assert "random" not in out
    assert json.loads((tmp_path / "r.json").read_text())["pipeline"] == "upgrade-opset"
    assert onnx.load(tmp_path / "f.onnx").opset_import[0].version == 18


def test_stderr_has_what_is_configured(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own(tmp_path, 'passes = "clean-casts"\nverify = false\nseed = 1\n')
    monkeypatch.setenv("REWRITER_BUILD", "false")
    _, _, error = quick("fix", model, "--dry-run", "--seed", "2")
    assert error.splitlines() == [
        "configuration: rewriter.toml sets passes, verify",
        "configuration: the environment sets build",
    ]
    assert quick("fix", model, "--dry-run", "-q")[2] == ""


def test_a_switch_is_turned_back_on(tmp_path: Path) -> None:
    own(tmp_path, "verify = false\nbuild = false\n")
    assert loaded(tmp_path).resolve(verify=True).arguments("fix") == {"verify": True, "build": False}
    assert "--no-verify" in quick("fix", "--help")[1]


@values
def test_an_error_about_an_option_names_its_file(model: Path, tmp_path: Path, text: str, words: str) -> None:
    own(tmp_path, text)
    code, _, error = quick("fix", model, "--dry-run")
    assert code == 2 and "error: " + words.format(tmp_path) in error


def test_a_contradiction_with_a_plan_names_the_file_that_set_it(model: Path, tmp_path: Path) -> None:
    code, _, error = quick("fix", model, "--dry-run", "--no-build", "--save-plan", tmp_path / "plan.json")
    assert code == 0, error
    own(tmp_path, 'plan = "plan.json"\n')
    code, _, error = quick("fix", model, "--dry-run", "--keep-fp32", "*")
    assert code == 2
    assert "--keep-fp32: it contradicts the plan" in error
    assert "(plan is set by rewriter.toml, key 'plan')" in error


def test_config_shows_what_is_resolved(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyproject(tmp_path, 'preset = "accurate"\npasses = "simplify"\n')
    monkeypatch.setenv("REWRITER_OPSET", "18")
    code, out, _ = quick("config")
    assert code == 0
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.strip()}
    assert rows["File:"] == "pyproject.toml"
    assert rows["preset"] == '"accurate" pyproject.toml [tool.rewriter]'
    assert rows["opset"] == "18 environment (REWRITER_OPSET)"
    assert rows["max-latency-cost"] == "0.16 preset accurate"
    assert rows["seed"] == "0 default"
    assert {key.key for key in KEYS.values()} <= set(rows)
    monkeypatch.setenv("REWRITER_CONFIG", "none")
    assert "No file" in quick("config")[1]


def test_the_library_reads_no_configuration(model: Path, tmp_path: Path) -> None:
    own(tmp_path, "nonsense = 1\n")
    result = api.fix(model, passes="clean-casts", verify=False)
    assert result.pipeline == "clean-casts"


# -- the page
def test_the_example_of_the_page_is_read(tmp_path: Path) -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    example = page.split("```toml\n")[1].split("```")[0]
    (tmp_path / "pyproject.toml").write_text(example)
    resolved = loaded(tmp_path).resolve()
    assert resolved.values["keep_fp32"] == ("*/head/*",)
    assert resolved.values["inputs"] == tmp_path / "calibration"
