"""Changes of one place in a file of Python: a sign, an axis, a merge or a comparison becomes another one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OPERATORS: dict[type[ast.operator], tuple[str, str, str]] = {
    ast.Add: ("sign", "+", "-"),
    ast.Sub: ("sign", "-", "+"),
    ast.Mult: ("sign", "*", "/"),
    ast.Div: ("sign", "/", "*"),
}
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
MERGES = {
    "SUM": "KEEP",
    "KEEP": "SUM",
    "MOMENTS": "SUM",
    "ADD_IN_PLACE": "CAT[0]",
    "SINGLE": "KEEP",
    "CAT[0]": "CAT[1]",
    "CAT[1]": "CAT[0]",
}
"""Ways to merge partial results, and another one for each."""
REDUCTIONS = {"sum": "mean", "mean": "sum", "add_": "sub_", "sub_": "add_", "cat": "stack", "amax": "amin"}
AXES = ("dim", "axis", "dims", "start_dim", "end_dim")
WITH_AXES = {
    *(
        "sum",
        "mean",
        "flatten",
        "unflatten",
        "unsqueeze",
        "squeeze",
        "movedim",
        "transpose",
        "select",
        "narrow",
    ),
    *(
        "index_select",
        "cat",
        "stack",
        "chunk",
        "split",
        "cumsum",
        "size",
        "any",
        "all",
        "amax",
        "repeat_interleave",
    ),
}
"""Functions and methods whose plain numbers are axes."""


@dataclass(frozen=True)
class Change:
    """A place in a file, and what stands there instead.

    Attributes:
        file: The path from the root of the repository.
        line: The number of the line, from 1.
        column: Where the old text begins in that line.
        kind: ``"sign"``, ``"axis"``, ``"merge"`` or ``"comparison"``.
        old: The old text.
        new: The new text.
    """

    file: str
    line: int
    column: int
    kind: str
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.kind}: {self.old} -> {self.new}"

    def applied(self, source: str) -> str:
        """The text of the file with the change."""
        lines = source.splitlines(keepends=True)
        line = lines[self.line - 1].encode()
        end = self.column + len(self.old.encode())
        assert line[self.column : end].decode() == self.old, self
        lines[self.line - 1] = (line[: self.column] + self.new.encode() + line[end:]).decode()
        return "".join(lines)


def changes_of(root: Path, file: str) -> list[Change]:
    """Every change of one file, from its beginning to its end."""
    source = (root / file).read_text(encoding="utf-8")
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda change: (change.line, change.column))


class _Finder(ast.NodeVisitor):
    """Collects changes, but none in annotations, texts, errors, or imports for type checkers."""

    def __init__(self, file: str, source: str) -> None:
        self.file, self.found = file, list[Change]()
        self._lines = [line.encode() for line in source.splitlines()]

    def _add(self, line: int, column: int, kind: str, old: str, new: str) -> None:
        self.found.append(Change(self.file, line, column, kind, old, new))

    def _between(self, left: ast.expr, right: ast.expr, kind: str, old: str, new: str) -> None:
        """Change an operator that stands between two operands, if both are in one line."""
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return
        gap = self._lines[right.lineno - 1][left.end_col_offset : right.col_offset].decode()
        if gap.count(old) == 1:
            self._add(right.lineno, left.end_col_offset + gap.index(old), kind, old, new)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for child in (
            *node.decorator_list,
            *node.args.defaults,
            *filter(None, node.args.kw_defaults),
            *node.body,
        ):
            self.visit(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if not (names and all(name[0].isupper() and not name.isupper() for name in names)):  # an alias of types
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """What an error says is no business of arithmetic."""

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Texts stay."""

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = any(isinstance(side, (ast.Constant, ast.JoinedStr)) and _is_text(side) for side in _sides(node))
        if type(node.op) in OPERATORS and not texts:
            self._between(node.left, node.right, *OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self._add(node.lineno, node.col_offset, "sign", "-", "+")
        elif isinstance(node.op, ast.Not):
            self._add(node.lineno, node.col_offset, "comparison", "not ", "")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, (ast.Add, ast.Sub)):
            old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            self._between(node.target, node.value, "merge", old, new)
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip(
            (node.left, *node.comparators), node.ops, node.comparators, strict=False
        ):
            self._between(left, right, "comparison", *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, "comparison", old, new)
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in MERGES and isinstance(node.ctx, ast.Load):
            self._add(node.lineno, node.col_offset, "merge", node.id, MERGES[node.id])

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if (text := ast.unparse(node)) in MERGES:
            self._add(node.lineno, node.col_offset, "merge", text, MERGES[text])
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            name, end = node.func.attr, node.func.end_col_offset
            if name in REDUCTIONS and end is not None and node.func.end_lineno is not None:
                self._add(node.func.end_lineno, end - len(name), "merge", name, REDUCTIONS[name])
            if name in WITH_AXES:
                for argument in node.args:
                    self._axes(argument)
        for keyword in node.keywords:
            if keyword.arg in AXES:
                self._axes(keyword.value)
        self.generic_visit(node)

    def _axes(self, node: ast.expr) -> None:
        """Change a plain number to a neighbour, in a tuple each of them."""
        if isinstance(node, ast.Tuple):
            for each in node.elts:
                self._axes(each)
            return
        text = ast.unparse(node)
        if text.lstrip("-").isdigit() and node.lineno == node.end_lineno:
            self._add(
                node.lineno, node.col_offset, "axis", text, str(int(text) + (1 if text in ("0", "-2") else -1))
            )


def _sides(node: ast.BinOp) -> Iterator[ast.expr]:
    yield from (node.left, node.right)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)
