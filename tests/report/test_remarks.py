"""The sentences of remarks: each kind that is handed out has one, which its values fill."""

import ast
import re
from dataclasses import fields
from pathlib import Path
from string import Formatter

import rewriter
from rewriter.report.remarks import SENTENCES
from rewriter.verification.verdict import Check

PACKAGE = Path(rewriter.__file__).parent
OWN = {"error", "origin", *(field.name for field in fields(Check))}


def test_every_remark_has_a_sentence_and_every_sentence_a_remark() -> None:
    trees = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    names = texts | {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    assert {kind for kind in SENTENCES if kind not in names} == {"reference-agrees", "reference-differs"}
    for call in nodes:
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "remark":
            kind, given = call.args[0], {keyword.arg for keyword in call.keywords}
            if isinstance(kind, ast.Constant) and isinstance(kind.value, str) and None not in given:
                sentence = re.sub(r"\[.*?\]", "", SENTENCES[kind.value])
                named = {name.partition(".")[0] for _, name, _, _ in Formatter().parse(sentence) if name}
                assert named <= given | OWN, kind.value
