"""What every test relies on."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
"""The same examples every time: a change is judged by what it changed, not by luck."""


def pytest_configure() -> None:
    """Ctrl-C interrupts, also where the suite was started with it ignored, as background jobs are."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("CI"):
        settings.load_profile("ci")
