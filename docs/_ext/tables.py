"""Tables of the manual that directives make from the code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList


def make_table(
    directive: Directive,
    rows: Iterable[Sequence[str]],
    *,
    header: Sequence[str],
    widths: Sequence[int],
    source: str,
) -> list[nodes.Node]:
    """Return a table whose cells are reStructuredText.

    :param source: the file that contains the texts, for messages about them.
    """
    lines = [
        ".. list-table::",
        "   :header-rows: 1",
        f"   :widths: {' '.join(map(str, widths))}",
        "",
    ]
    for first, *others in (header, *rows):
        lines += [f"   * - {first}", *(f"     - {cell}" for cell in others)]
    container = nodes.container()
    directive.state.nested_parse(StringList(lines, source=source), 0, container)
    return container.children
