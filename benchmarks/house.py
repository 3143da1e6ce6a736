"""``python -m benchmarks.house``: the size and shape of the package; ``results/house.json``.

Lines of code are lines with a token that is neither a comment nor a docstring. Branches are counted as ruff
does (C901). Nothing depends on the machine.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1] / "packprop"
RESULTS = Path(__file__).parent / "results" / "house.json"
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
STOREYS = ("engine", "applications")


def lines_of_code(text: str) -> int:
    """Count the lines of a file that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def parameters(function: ast.FunctionDef) -> int:
    """Count the parameters of a function, without ``self`` and ``cls``."""
    given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(given) - bool(given and given[0].arg in ("self", "cls"))


def functions_over(branches: int) -> int:
    """Count the functions with more branches than a number."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--isolated",
        "--select",
        "C901",
        "--output-format",
        "json",
    ]
    command += ["--config", f"lint.mccabe.max-complexity={branches}", str(PACKAGE)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return len(json.loads(found.stdout))


def measured() -> dict[str, Any]:
    """Return all numbers."""
    code: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    many = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        room = "/".join(parts[:2]) if parts[0] in STOREYS else parts[0]
        text = path.read_text(encoding="utf-8")
        code[room] += lines_of_code(text)
        lines[room] += text.count("\n")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and parameters(node) > 8:
                many[f"{'/'.join(parts)}:{node.name}"] = parameters(node)
    reading = ("engine/recording", "engine/graph", "engine/functions", "engine/samples")
    return {
        "entries at the top": len([path for path in PACKAGE.iterdir() if path.name != "__pycache__"]),
        "lines of code": sum(code.values()),
        "lines": sum(lines.values()),
        "lines of recording, graph, functions, samples": sum(lines[room] for room in reading),
        "their lines of code": sum(code[room] for room in reading),
        "functions with more than 15 branches": functions_over(15),
        "functions with more than 18 branches": functions_over(18),
        "functions with more than 8 parameters": many,
        "lines of code by room": dict(code.most_common()),
    }


if __name__ == "__main__":
    found = measured()
    RESULTS.write_text(json.dumps({"suite": "house", **found}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
