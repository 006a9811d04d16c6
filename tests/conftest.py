"""What every test relies on."""

import signal

import pytest
from hypothesis import settings
from nightly import ALONE, NIGHTLY, sized

from rewriter.base import sandbox

settings.register_profile("own", deadline=None, max_examples=sized(20, 300), derandomize=not NIGHTLY)
"""A busy machine is no failure, and by day nor is luck: the examples are the same every time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update", action="store_true", help="write what passes and fix give now: passes/text, jobs/golden"
    )


def pytest_configure() -> None:
    """Ctrl-C interrupts, also where the suite was started with it ignored, as background jobs are."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    settings.load_profile("own")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = tuple(argument.partition("::")[0] for argument in config.args if ".py" in argument)
    for item in items:
        alone = item.nodeid.removeprefix("tests/").startswith(ALONE)
        if alone and not NIGHTLY and not item.nodeid.startswith(named):
            item.add_marker(pytest.mark.skip(reason="`make nightly` runs it"))


WALLED = ("batch", "cli", "engines", "gpu", "model", "suites")
"""Rooms of tests whose subject is the child process around native code. In others, by day, it runs in the
test's own process: children cost up to half of the time."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    sandbox.inside = not NIGHTLY and item.path.parent.name not in WALLED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the counts of suites, which tests hand over as `record_property("counts", ...)`."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in report.user_properties:
            if name == "counts":
                terminalreporter.write_line(str(value))
