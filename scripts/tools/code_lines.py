"""Prints the number of lines of code, without docstrings, comments and blank lines.

``python -m scripts.tools.code_lines`` counts each package of ``synapse_replication``;
the last line is the total.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def count_code_lines(source: str) -> int:
    """Return the number of lines that contain code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines)


def main(folder: Path) -> None:
    """Print the count of each package in a folder, largest first, and the total."""
    counts: Counter[str] = Counter()
    for path in folder.rglob("*.py"):
        package, *rest = path.relative_to(folder).parts
        counts[package if rest else "."] += count_code_lines(path.read_text())
    for package, count in counts.most_common():
        sys.stdout.write(f"{package:<20}{count:>8,}\n")
    sys.stdout.write(f"{'lines of code':<20}{counts.total():>8,}\n")


if __name__ == "__main__":
    main(Path("synapse_replication"))
