"""Accept references to names that exist but have no page.

Signatures mention types that are not public. Such a reference is printed without a
link; a reference to a name that does not exist is still reported.
"""

from __future__ import annotations

import importlib
from typing import Any

from sphinx.application import Sphinx


def exists(target: str) -> bool:
    """Return whether ``target`` names a module of this package, or something in one."""
    parts = target.split(".")
    if parts[0] != "synapse_replication":
        return False
    found: Any = None
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if hasattr(found, parts[end - 1]):
            found = getattr(found, parts[end - 1])
            continue
        try:
            found = importlib.import_module(name)
        except ImportError:
            return False
    return True


def resolve(app: Sphinx, env: Any, node: Any, contnode: Any) -> Any:
    """Return the text of the reference if its target exists."""
    is_python = node.get("refdomain") == "py"
    return contnode if is_python and exists(node.get("reftarget", "")) else None


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the handler of missing references with Sphinx."""
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
