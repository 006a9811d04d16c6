"""A script with a slow state and a growing cache, in two models, one of them from bytes."""

import sys
from pathlib import Path

from graphs import graph

from rewriter.ir.model import save

ENCODER = """
g (float[1, 4] x, float[1, 4] mean, float[1, 4] fast)
    => (float[1, 4] y, float[1, 4] new_mean, float[1, 4] new_fast) {
    keep = Constant <value = float {0.99}> ()
    share = Constant <value = float {0.01}> ()
    old = Mul (mean, keep)
    new = Mul (x, share)
    new_mean = Add (old, new)
    little = Mul (y, share)
    both = Add (fast, little)
    new_fast = Tanh (both)
    y = Sub (x, new_mean)
}"""

DECODER = """
g (float[1, 4] y, float[1, past, 4] cache, int64[1] at)
    => (float[1, 4] z, float[1, total, 4] new_cache, float[1, 1, 4] part) {
    axes = Constant <value = int64[1] {1}> ()
    part = Unsqueeze (y, axes)
    new_cache = Concat <axis = 1> (cache, part)
    z = ReduceMean <axes = [1], keepdims = 0> (new_cache)
}"""

SCRIPT = """
import sys
from pathlib import Path
from typing import Any
import numpy as np
import onnxruntime as ort
folder, calls = Path(sys.argv[1]), int(sys.argv[2])
encoder = ort.InferenceSession(folder / "encoder" / "model.onnx")
decoder = ort.InferenceSession((folder / "decoder.onnx").read_bytes())
data = np.random.default_rng(0)
mean, fast, ones = np.full((1, 4), 40, np.float32), np.zeros((1, 4), np.float32), np.ones((1, 4), np.float32)
cache, joined = np.zeros((1, 0, 4), np.float32), np.zeros((1, 0, 4), np.float32)
for call in range(calls):
    x = (15 * data.standard_normal((1, 4)) + 40).astype(np.float32)
    y, mean, fast = encoder.run(None, {"x": x, "mean": mean, "fast": fast})
    z, cache, _ = decoder.run(None, {"y": y, "cache": cache, "at": np.array([call])})
    part = decoder.run(["part"], {"y": ones, "cache": joined, "at": np.array([0])})[0] if call < 3 else 0
print(z, cache.shape)
sys.exit(5)
"""


def streaming_script(tmp_path: Path) -> list[str]:
    """Writes the models and the script; returns its command line, which ends with the number of frames."""
    folder = tmp_path / "models"
    (folder / "encoder").mkdir(parents=True)
    save(graph(ENCODER), folder / "encoder" / "model.onnx")
    save(graph(DECODER, opset=13), folder / "decoder.onnx")
    (tmp_path / "script.py").write_text(SCRIPT)
    return [sys.executable, str(tmp_path / "script.py"), str(folder), "40"]
