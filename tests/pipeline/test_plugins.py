"""Passes of other packages: really installed, listed, run, and held to the contract."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from graphs import graph
from paths import TESTS

from rewriter.ir.errors import RewriterError
from rewriter.ir.model import save
from rewriter.pipeline.catalogue import passes
from rewriter.pipeline.driver import run

NEGS = """
    g (float[2] x) => (float[2] y) {
        a = Neg(x)
        b = Neg(a)
        c = Neg(b)
        d = Neg(c)
        y = Relu(d)
    }"""


def install(package: str, folder: Path) -> Path:
    """The package of tests/ as pip installs it, in a folder of its own."""
    source, site = folder / package, folder / f"site-{package}"
    shutil.copytree(TESTS / package, source, ignore=shutil.ignore_patterns("__pycache__"))
    options = "-q --no-deps --no-index --no-build-isolation --target".split()
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(site), str(source)], check=True)
    return site


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example package is installed."""
    return install("plugin", tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed that does everything wrong."""
    return install("bad_plugin", tmp_path_factory.mktemp("bad"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Four Negs and a Relu."""
    source = graph(NEGS)
    for index, node in enumerate(source.proto.graph.node):
        node.name = f"n{index}"
    return save(source, tmp_path / "model.onnx")


def rewriter(*arguments: str | Path, sites: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    """`python -m rewriter` with the packages of `sites` installed beside it."""
    paths = os.pathsep.join(map(str, [*sites, TESTS.parent]))
    environment = {**os.environ, "PYTHONPATH": paths, "COLUMNS": "120"}
    command = [sys.executable, "-m", "rewriter", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def flat(text: str) -> str:
    return " ".join(text.split())


def test_it_is_listed_with_its_package(good: Path) -> None:
    done = rewriter("passes", sites=(good,))
    assert done.returncode == 0, done.stderr
    assert "drop-double-neg bit-equal Two Negs in a row are no work at all" in flat(done.stdout)
    assert "[acme-passes 1.2]" in flat(done.stdout)
    assert "warning" not in done.stdout


def test_it_is_explained_as_ours_are(good: Path) -> None:
    done = rewriter("passes", "show", "drop-double-neg", sites=(good,))
    assert done.returncode == 0, done.stderr
    assert "From acme-passes 1.2, not a part of rewriter." in done.stdout
    assert "- `keep` (text,text,...; default nothing): Names of nodes to leave alone." in done.stdout
    assert "- it makes an output, whose name has to stay" in done.stdout


def test_it_runs_where_a_pipeline_names_it(good: Path, model: Path, tmp_path: Path) -> None:
    out, pipeline = tmp_path / "fixed.onnx", "drop-double-neg{keep=n1,n2,n3},drop-double-neg"
    done = rewriter("fix", model, "-o", out, "--passes", pipeline, "--no-build", "-v", sites=(good,))
    assert done.returncode == 0, done.stderr
    assert [node.op_type for node in onnx.load(out).graph.node] == ["Relu"]
    assert "it is to be kept" in done.stdout


def refused(monkeypatch: pytest.MonkeyPatch, model: Path, pipeline: str, *sites: Path) -> str:
    """The error of a pipeline with packages in these folders."""
    for site in sites:
        monkeypatch.syspath_prepend(str(site))
    with pytest.raises(RewriterError) as caught:
        run(model, pipeline)
    return flat(str(caught.value))


def test_a_slip_is_an_error_with_the_nearest(
    good: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(monkeypatch, model, "drop-double-neg{kep=a}", good)
    assert "drop-double-neg has no option 'kep'" in error and "did you mean 'keep'?" in error
    assert "did you mean 'drop-double-neg'?" in refused(monkeypatch, model, "drop-double-nag")


BROKEN = [
    pytest.param(
        "rename-output",
        ["pass rename-output of bad-passes 0.1 broke its contract", "inputs or outputs changed"],
        id="it renames an output",
    ),
    pytest.param(
        "divide-by-zero",
        [
            "pass divide-by-zero of bad-passes 0.1 failed: ZeroDivisionError",
            "report it to the authors of bad-passes 0.1",
        ],
        id="it raises an error",
    ),
    pytest.param(
        "no-import",
        [
            "pass 'no-import' of bad-passes 0.1 (bad_passes.missing_library:Pass)",
            "it cannot be imported",
            "No module named 'acme_runtime'",
            "uninstall that package",
        ],
        id="it cannot be imported",
    ),
    pytest.param(
        "other-name",
        ["its class has the name 'divide-by-zero': it has to be that of the entry point"],
        id="it has two names",
    ),
    pytest.param("no-pass", ["it is no class that derives from GraphPass or ModelPass"], id="it is no pass"),
]


@pytest.mark.parametrize(("name", "words"), BROKEN)
def test_a_broken_one_is_an_error_that_names_its_package(
    bad: Path, model: Path, name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(monkeypatch, model, name, bad)
    for word in words:
        assert word in error


def test_verification_holds_it_to_the_exactness_that_it_claims(bad: Path, model: Path) -> None:
    command = ("fix", model, "--dry-run", "--passes", "neg-to-abs", "--no-build")
    failed = rewriter(*command, "--no-repair", sites=(bad,))
    assert failed.returncode == 1, failed.stderr
    assert "VERIFICATION FAILED (structure)" in flat(failed.stdout)
    repaired = rewriter(*command, sites=(bad,))
    assert repaired.returncode == 0, repaired.stderr
    assert "without neg-to-abs, which changed the result in FP32" in flat(repaired.stdout)


def test_broken_ones_are_in_nobodys_way(bad: Path, model: Path, tmp_path: Path) -> None:
    """Our own isolate-clip runs, and the list tells what is wrong with each of theirs."""
    out = tmp_path / "fixed.onnx"
    done = rewriter("fix", model, "-o", out, "--preset", "structure-only", "--no-build", sites=(bad,))
    assert done.returncode == 0, done.stderr
    listed = rewriter("passes", sites=(bad,))
    assert listed.returncode == 0, listed.stderr
    told = flat(listed.stdout)
    assert "warning: bad-passes 0.1 offers a pass 'isolate-clip': ours of that name is used" in told
    assert (
        "pass 'no-import' of bad-passes 0.1 (bad_passes.missing_library:Pass): it cannot be imported" in told
    )


def test_two_packages_with_one_name_are_an_error_for_those_who_use_it(
    good: Path, bad: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = refused(monkeypatch, model, "drop-double-neg", good, bad)
    assert "acme-passes 1.2 and bad-passes 0.1 both offer a pass 'drop-double-neg'" in error
    warnings = list[str]()
    passes(warnings)
    assert any("neither can be used" in one for one in warnings)
