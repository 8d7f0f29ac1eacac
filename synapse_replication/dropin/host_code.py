"""Access to the code of the host, which is imported when it is needed."""

from __future__ import annotations

import importlib
import sys
from typing import Any, TypeVar

from twisted.internet.defer import Deferred

T = TypeVar("T")

_CONTEXT = "synapse.logging.context"


def host_attribute(module: str, name: str) -> Any:
    """Return the host's object with this name, or its replacement if there is one."""
    return getattr(importlib.import_module(f"synapse.replication.tcp.{module}"), name)


def make_yieldable(deferred: Deferred[T]) -> Deferred[T]:
    """Return a Deferred whose awaiting caller resumes in its own log context."""
    # import_module() takes longer than the rest of this function.
    context: Any = sys.modules.get(_CONTEXT) or importlib.import_module(_CONTEXT)
    yieldable: Deferred[T] = context.make_deferred_yieldable(deferred)
    return yieldable
