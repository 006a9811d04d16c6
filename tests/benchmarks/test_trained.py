"""Results of packages compared, and the table of what each pass and rule is worth."""

from __future__ import annotations

from benchmarks.ablation import table
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


def test_what_a_pass_is_worth_is_told_apart_for_trained_networks() -> None:
    rows = {"all": {"error": 1e-3}, "simplify": {"changes": 1}, "fold-strides": {"changes": 1, "error": 2e-3}}
    broken = {"all": {"error": 1e-3}, "rule overflow": {"changes": 2, "error": None}}
    lines = table({"magika": {"rows": rows}, "resnet": {"rows": broken}}).splitlines()
    assert lines[2:] == ["| fold-strides | magika 2.00 | - |", "| rule overflow | - | resnet not finite |"]
