"""Parts within parts, such as scores of a quiet clip beside its boxes: 28 right pairs and 28 wrong ones."""

from pathlib import Path

import numpy as np
import pytest
from graphs import with_weights

import rewriter
from rewriter.ir.model import Array, Model, save
from rewriter.jobs.fix.before import lowered

SHAPES = {
    "a quiet clip's scores": ((3, 16, 200), (24, 1), (3, 1, 1)),
    "channels of a quiet head": ((4, 16, 64), (12, 1), (4, 1, 1)),
    "sigma of a quiet item": ((6, 16, 40), (2, 1), (6, 1, 1)),
    "channels beside an outlier, tokens beside a sink": ((1, 16, 300), (32, 1), (1, 1, 300)),
}
TEXT = """g (float[{x}] x, float[{n},16] w, float[{n},16] v, float[{columns}] columns, float[{items}] items,
    float[{shape}] spoiled) => (float[{shape}] y) {{
    l = MatMul(w, x) t = Tanh(l) m = MatMul(v, x) s = Sigmoid(m) p = Mul(t, s) c = Mul(p, columns)
    i = Mul(c, items) y = Mul(i, spoiled) }}"""


def network(form: str, seed: int, spoil: float) -> Model:
    """Columns and items of two scales each; small columns in small items are off by `spoil`."""
    x, column, item = SHAPES[form]
    drawn = np.random.default_rng(seed)
    columns, items = np.full(column, drawn.uniform(100, 600)), np.ones(item)
    fewest = 1 + column[0] // 8  # of two large channels that one token makes, scales may be chance
    columns[drawn.integers(fewest, column[0]) :] = drawn.uniform(0.1, 1.0)
    if drawn.integers(2) and len(columns) > 4:
        columns = columns * drawn.uniform(0.5, 2.0, columns.shape)
    flat = items.reshape(-1)
    flat[1:] = drawn.uniform(0.5, 1.0, flat.size - 1)
    small = np.s_[-1:] if drawn.integers(2) or flat.size < 3 else np.s_[-2:]
    small = np.s_[1:] if item[-1] > 1 else small
    flat[small] *= drawn.uniform(0.002, 0.02)
    shape = (x[0], column[0], x[2])
    inner = (columns < columns.max() / 16) & (items < items.max() / 16)
    noise = np.where(inner, 1.0 + spoil * np.sign(drawn.normal(size=shape)), 1.0)
    names = {"x": x, "columns": column, "items": item, "shape": shape}
    text = TEXT.format(n=column[0], **{name: ",".join(map(str, size)) for name, size in names.items()})
    weights: dict[str, Array] = {"columns": columns, "items": items, "spoiled": noise}
    weights |= {name: drawn.normal(size=(column[0], 16)) / 4 for name in ("w", "v")}
    return with_weights(text, {name: value.astype(np.float32) for name, value in weights.items()})


def verified(form: str, seed: int, right: Model, folder: Path) -> rewriter.VerifyResult:
    data = [
        {"x": np.random.default_rng((seed, n)).normal(size=SHAPES[form][0]).astype(np.float32)}
        for n in (0, 1)
    ]
    other = save(right, folder / "other.onnx")
    return rewriter.verify(network(form, seed, 0.0).whole(), other, inputs=data, build=False)


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("seed", range(7))
def test_plain_fp16_of_parts_within_parts_is_verified(form: str, seed: int, tmp_path: Path) -> None:
    result = verified(form, seed, lowered(network(form, seed, 0.0), "fp16"), tmp_path)
    assert result.passed, result.checks[0].summary


@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("seed", range(7))
def test_a_wrong_part_within_a_part_fails_and_is_named(form: str, seed: int, tmp_path: Path) -> None:
    result = verified(form, seed, network(form, seed, 0.3), tmp_path)
    assert not result.passed and "of axis" in result.checks[0].summary
    worst = max(result.checks[0].outputs, key=lambda output: output.relative_l2)
    assert ", in " in worst.name and worst.relative_l2 > 0.2
