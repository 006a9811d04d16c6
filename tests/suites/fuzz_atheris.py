"""Fuzzes one target with atheris, guided by the coverage of our code: `python fuzz_atheris.py loader 150`.

The exit code is not 0 if an input raised anything but an error of ours, crashed or hung; the input is then in
the current folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
with atheris.instrument_imports(  # pyright: ignore[reportAttributeAccessIssue]
    include=["rewriter"]
):
    from fuzz_targets import TARGETS

SLOW_S = 20
"""Time after which one input counts as hanging."""


def main(name: str, seconds: int) -> None:
    target = TARGETS[name]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for number, seed in enumerate(target.seeds):
            (corpus / str(number)).write_bytes(seed)
        options = [f"-max_total_time={seconds}", f"-timeout={SLOW_S}", "-max_len=4096", "-rss_limit_mb=4096"]
        if target.words:  # libFuzzer refuses an empty dictionary
            words = Path(folder) / "words"
            words.write_text("".join(f'"{word}"\n' for word in target.words))
            options.append(f"-dict={words}")
        atheris.Setup([sys.argv[0], *options, "-print_final_stats=1", str(corpus)], target.survive)
        atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
