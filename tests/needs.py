"""Marks of tests that need a library, or a machine without a GPU."""

import shutil
from importlib.util import find_spec

import pytest

needs_rtx = pytest.mark.skipif(find_spec("tensorrt_rtx") is None, reason="needs pip install tensorrt-rtx")

# not `this_machine.gpu()`, which some of these tests check
without_gpu = pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU")
