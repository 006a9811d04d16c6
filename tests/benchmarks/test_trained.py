"""Results of packages compared, and the files that stages of a benchmark write."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.comparison import last_words, write_json
from benchmarks.trained_results import Item, compared


def test_results_are_equal_by_label_and_time_in_any_order() -> None:
    notes = [Item("60", span=(0.0, 0.5)), Item("62", span=(0.5, 1.0))]
    later = [Item("62", span=(0.52, 1.0)), Item("60", span=(0.0, 0.6))]
    found = compared([notes, [Item("nsfw")]], [later, [Item("sfw")]])
    assert (found["inputs"], found["items"], found["same"]) == (2, 3, 1)
    assert [line.split(" IoU")[0] for line in found["differences"]] == [
        "input 0: 60 (0.0, 0.5)",
        "input 1: nsfw ",
    ]


def test_a_result_too_many_or_twice_is_no_equal_one() -> None:
    line = Item("a line")
    assert compared([[line]], [[line, line]])["items"] == 2
    assert compared([[line, line]], [[line]])["same"] == 1


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_json(file, {"a": 1})
    with pytest.raises(TypeError):
        write_json(file, {"a": object()})
    assert file.read_text() == '{\n "a": 1\n}\n'


def test_the_last_words_of_a_failed_command_are_its_note(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"started\nerror: {tmp_path}/x.onnx is no model\nwhat to do: export it again\n")
    assert last_words(log, 2) == "error: x.onnx is no model"
    assert last_words(log, 0) == ""
    log.write_text("")
    assert last_words(log, -9) == "exit code -9"
