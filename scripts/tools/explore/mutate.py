"""Mutations of the reader, which the exploration or a test should notice.

::

    python -m scripts.tools.explore.mutate FOLDER [COUNT [SEED]]

FOLDER is an empty folder, to which the checkout is copied. Each mutation is applied to
the reader or its state there; then the tests of the reader, the sequences that the
exploration once found, the small worlds and the tests of the driver are run, until one
of them fails. Prints one line for each mutation.
"""

from __future__ import annotations

import ast
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).parents[3]
_MODULES: Final = [
    Path("synapse_replication/streams") / name
    for name in ("reader.py", "reader_state.py")
]
_TRIAL: Final = ("-m", "twisted.trial", "--temp-directory", "_trial_mutated")
#: The commands that may notice a mutation, the fastest first.
_FINDERS: Final = (
    ("unit tests", [*_TRIAL, "tests.streams.test_reader"]),
    ("found sequences", [*_TRIAL, "tests.tools.explore.test_found"]),
    ("exploration", ["-m", "scripts.tools.explore", "--shallow"]),
    (
        "driver tests",
        [*_TRIAL, "tests.handlers.receiving", "tests.dropin.test_synapse_host"],
    ),
)
_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


def places(tree: ast.AST) -> list[Any]:
    """Return the nodes of the machine that can be changed."""
    return [
        node
        for machine in ast.walk(tree)
        if isinstance(machine, ast.ClassDef)
        for method in machine.body
        if isinstance(method, ast.FunctionDef)
        for statement in method.body
        for node in ast.walk(statement)
        if _is_place(node)
    ]


def _is_place(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return type(node.ops[0]) in _COMPARISONS
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
    if isinstance(node, ast.Constant):
        return node.value in (0, 1) or isinstance(node.value, bool)
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute) for target in node.targets)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    return isinstance(node, (ast.BoolOp, ast.BinOp))


def change(node: Any) -> None:
    """Change a node that :func:`places` returned."""
    if isinstance(node, ast.Compare):
        node.ops[0] = _COMPARISONS[type(node.ops[0])]()
    elif isinstance(node, ast.Call):
        assert isinstance(node.func, ast.Name)
        node.func.id = "max" if node.func.id == "min" else "min"
    elif isinstance(node, ast.Constant):
        node.value = (
            not node.value if isinstance(node.value, bool) else 1 - int(str(node.value))
        )
    elif isinstance(node, ast.Assign):
        # Assign to a name that is not used.
        node.targets = [ast.Name("_unused", ast.Store())]
    elif isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
    elif isinstance(node, ast.BoolOp):
        node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    else:
        node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()


def _finder(folder: Path) -> str:
    """Return what notices the mutation; an empty text if nothing does."""
    for name, command in _FINDERS:
        try:
            run = subprocess.run(
                [sys.executable, *command],
                cwd=folder,
                env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
                capture_output=True,
                timeout=900,
            )
        except subprocess.TimeoutExpired:
            return f"{name} (no end)"
        if run.returncode == 1:
            return name
    return ""


def main(arguments: list[str]) -> None:
    """Try mutations, and print which were noticed."""
    folder = Path(arguments[0])
    count = int(arguments[1]) if len(arguments) > 1 else 100
    chooser = random.Random(int(arguments[2]) if len(arguments) > 2 else 1)
    for name in ("synapse_replication", "scripts", "tests"):
        shutil.copytree(_ROOT / name, folder / name, dirs_exist_ok=True)
    sources = {path: (_ROOT / path).read_text() for path in _MODULES}
    found = [
        (path, index)
        for path, source in sources.items()
        for index in range(len(places(ast.parse(source))))
    ]
    for number, (path, index) in enumerate(
        chooser.sample(found, min(count, len(found)))
    ):
        tree = ast.parse(sources[path])
        node = places(tree)[index]
        before = (ast.get_source_segment(sources[path], node) or "").split("\n")[0]
        change(node)
        (folder / path).write_text(ast.unparse(ast.fix_missing_locations(tree)))
        noticed_by = _finder(folder) or "SURVIVED"
        print(  # noqa: T201 -- the result
            f"{number + 1}: {path.name}:{node.lineno}, {type(node).__name__}: "
            f"{before}: {noticed_by}",
            flush=True,
        )
        (folder / path).write_text(sources[path])


if __name__ == "__main__":
    main(sys.argv[1:])
