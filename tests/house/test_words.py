"""Words and numbers of messages."""

import pytest

from rewriter.base.text import article, count, figure

COUNTS = {
    (1, "sample"): "1 sample",
    (2, "sample"): "2 samples",
    (0, "mass"): "0 masses",
    (3, "entry"): "3 entries",
}
ARTICLES = {"LayerNorm": "a LayerNorm", "epsilon": "an epsilon", "Unsqueeze": "an Unsqueeze"}
FIGURES = {65504.0: "65504", 8.2e7: "8.2e7", 7e7: "7e7", 0.00054: "0.00054", 0.3192: "0.32", 1e-6: "1e-6"}
FIGURES |= {12000.4: "12000", float("inf"): "infinity", float("nan"): "NaN", 0.0: "0"}


@pytest.mark.parametrize(("given", "text"), COUNTS.items())
def test_counts(given: tuple[int, str], text: str) -> None:
    assert count(*given) == text


@pytest.mark.parametrize(("word", "text"), ARTICLES.items())
def test_articles(word: str, text: str) -> None:
    assert article(word) == text


@pytest.mark.parametrize(("value", "text"), FIGURES.items())
def test_figures(value: float, text: str) -> None:
    assert figure(value) == text
