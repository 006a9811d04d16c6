"""The files that the default preset writes stay equal, unless a change means to change them.

After such a change: `python tests/jobs/test_golden.py` writes golden.json anew; the commit says why.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from paths import ROOT

import rewriter

GOLDEN = Path(__file__).with_name("golden.json")
NAMES = ("bert", "conv_clip", "if_loop", "mixed_casts", "mobilenet_v2", "nafnet", "qdq", "t5_encoder", "vit")


def digest(name: str) -> str:
    """SHA-256 of what `fix` makes of a case model, without its metadata."""
    model = ROOT / f"models/{name}.onnx"
    proto = rewriter.fix(model, inputs=model.with_suffix(".npz"), verify=False).proto
    del proto.metadata_props[:]
    proto.producer_version = ""
    return hashlib.sha256(proto.SerializeToString(deterministic=True)).hexdigest()


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_the_known_one(name: str) -> None:
    assert digest(name) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: digest(name) for name in NAMES}, indent=1) + "\n")
