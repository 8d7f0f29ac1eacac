"""A plugin of mypy that records every access to an attribute of some classes.

The file ``SYNAPSE_REPLICATION_ACCESSES`` receives a line of JSON for each access: the
class and the attribute, the module, and the class whose method accesses it, if any.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from mypy.nodes import TypeInfo
from mypy.plugin import AttributeContext, MethodContext, Plugin
from mypy.types import Type


class AccessPlugin(Plugin):
    """Records accesses; changes no type."""

    def get_method_hook(self, fullname: str) -> Callable[[MethodContext], Type] | None:
        """Return a function that records a call of a method."""
        return self._recorder(fullname, "default_return_type")

    def get_attribute_hook(
        self, fullname: str
    ) -> Callable[[AttributeContext], Type] | None:
        """Return a function that records an access to an attribute of an object."""
        return self._recorder(fullname, "default_attr_type")

    def get_class_attribute_hook(
        self, fullname: str
    ) -> Callable[[AttributeContext], Type] | None:
        """Return a function that records an access to an attribute of a class."""
        return self._recorder(fullname, "default_attr_type")

    def _recorder(self, fullname: str, result: str) -> Callable[[Any], Type] | None:
        if not fullname.startswith("synapse."):
            return None

        def record(context: Any) -> Type:
            checker = context.api
            classes = [
                each.fullname
                for each in checker.scope.stack
                if isinstance(each, TypeInfo)
            ]
            by = classes[-1] if classes else None
            self._write([fullname, checker.tree.fullname, by])
            default: Type = getattr(context, result)
            return default

        return record

    def _write(self, access: list[str | None]) -> None:
        path = os.environ["SYNAPSE_REPLICATION_ACCESSES"]
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(access) + "\n")


def plugin(version: str) -> type[Plugin]:
    """Return the plugin. Called by mypy."""
    return AccessPlugin
