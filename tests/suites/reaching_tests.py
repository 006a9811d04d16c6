"""Which tests reach a line of our code, and how long each of them took: from one measured run."""

import os
import statistics
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData


@dataclass(frozen=True)
class ReachingTests:
    """`lines` has the tests of each line of each file, `seconds` what a test took."""

    lines: dict[str, dict[int, frozenset[str]]]
    seconds: dict[str, float]

    def of(self, places: Mapping[str, Iterable[int]], limit_s: float) -> list[str]:
        """Tests that reach one of the lines of files, fastest first, `limit_s` seconds of them.

        A line that runs at import, or in a child process alone, has no test of its own: where there is no
        other line, the tests of its file stand in for it.
        """
        known = {file: self.lines.get(file, {}) for file in places}
        here = {
            test for file, lines in places.items() for line in lines for test in known[file].get(line, ())
        }
        chosen: list[str] = []
        spent = 0.0
        anywhere = {test for by_line in known.values() for tests in by_line.values() for test in tests}
        for test in sorted(here or anywhere, key=self._cost):
            spent += self.seconds[test]
            if chosen and spent > limit_s:
                break
            chosen.append(test)
        return chosen

    def _cost(self, test: str) -> tuple[float, str]:
        return self.seconds[test], test


def measured(root: Path, tests: list[str], folder: Path) -> ReachingTests:
    """Runs tests of a repository with coverage, and keeps what that found in `folder`.

    Raises:
        SystemExit: a test fails without any mutant
    """
    data, times = folder / "coverage", folder / "times.xml"
    if not data.exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = ["-q", *tests, "--cov", "--cov-context=test", "--cov-report="]
        command = [sys.executable, "-m", "pytest", *options]
        environment = os.environ | {"COVERAGE_FILE": str(data)}
        done = subprocess.run([*command, f"--junitxml={times}"], cwd=root, env=environment, check=False)
        if done.returncode != 0:
            data.unlink(missing_ok=True)
            sys.exit("tests fail without any mutant")
    return _read(root, data, times)


def _read(root: Path, data: Path, times: Path) -> ReachingTests:
    seconds = _seconds(times)
    usual = statistics.median(seconds.values())
    found = CoverageData(str(data))
    found.read()
    lines, ids = {}, set()
    for file in found.measured_files():
        if not Path(file).is_relative_to(root):
            continue  # a child imported another copy
        by_line = {line: _tests(contexts) for line, contexts in found.contexts_by_lineno(file).items()}
        lines[str(Path(file).relative_to(root))] = by_line
        ids |= set().union(*by_line.values())
    return ReachingTests(lines, {test: seconds.get(_spoken(test), usual) for test in ids})


def _tests(contexts: Iterable[str]) -> frozenset[str]:
    """Ids of tests; a context is `id|setup`, `id|run` or `id|teardown`, and "" outside every test."""
    return frozenset(context.rpartition("|")[0] for context in contexts if context and context.isprintable())


def _seconds(times: Path) -> dict[str, float]:
    cases = ElementTree.parse(times).iter("testcase")
    return {f"{case.get('classname')}.{case.get('name')}": float(case.get("time", 0)) for case in cases}


def _spoken(test: str) -> str:
    """The id of a test as a JUnit file writes it: `tests.room.test_file.TestClass.test_name[id]`."""
    path, _, rest = test.partition("::")
    name, bracket, parameters = rest.partition("[")
    return f"{path.removesuffix('.py').replace('/', '.')}.{name.replace('::', '.')}{bracket}{parameters}"
