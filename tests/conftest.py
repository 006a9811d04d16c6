"""What every test relies on."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Ctrl-C interrupts, also where the suite was started with it ignored, as background jobs are."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
