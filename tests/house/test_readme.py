"""README.md: every command line in it parses, and every link leads to a file."""

from __future__ import annotations

import re

import pytest
from command_lines import parsed
from paths import ROOT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [
    line
    for language, block in BLOCKS
    for line in block.splitlines()
    if not language and line.startswith("rewriter ")
]


def test_there_are_commands_of_every_kind() -> None:
    names = {line.split()[1] for line in COMMANDS}
    wanted = set("fix scan verify locate compare-inputs probe presets passes config hook".split())
    assert wanted <= names


@pytest.mark.parametrize("line", [line for line in COMMANDS if "--install-completion" not in line])
def test_a_command_line_of_the_readme_parses(line: str) -> None:
    parsed(line)


@pytest.mark.parametrize(
    "line", ["rewriter fix m.onnx --no-such-option", "rewriter nothing", "rewriter verify a"]
)
def test_a_command_line_that_is_wrong_would_be_found(line: str) -> None:
    with pytest.raises(Exception, match=r"(?i)no such|missing") as caught:
        parsed(line)
    assert type(caught.value).__mro__[1].__name__ in {"UsageError", "BadParameter", "ClickException"}


@pytest.mark.parametrize("target", sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT))))
def test_a_link_leads_to_a_file(target: str) -> None:
    assert (ROOT / target).exists()
