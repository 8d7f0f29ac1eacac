"""Tests for what the installed homeserver reads from the objects that are replaced.

The homeserver is typed, so mypy knows the class of each object whose attribute is read.
It analyses all modules of the homeserver, and a plugin records the accesses.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from twisted.trial.unittest import SkipTest, SynchronousTestCase

from synapse_replication.dropin.introspection import instance_attributes
from synapse_replication.dropin.substitution import Substitution
from tests.external import skip_reason
from tests.external.synapse.homeserver import original_of, substitutions

skip = skip_reason("synapse")

#: Classes of the homeserver that only replaced code creates or inherits from.
HELPERS = frozenset(
    {
        "synapse.replication.tcp.protocol.BaseReplicationStreamProtocol",
        "synapse.replication.tcp.redis.RedisSubscriber",
        "synapse.storage.util.id_generators._MultiWriterCtxManager",
    }
)

CONFIGURATION = """
[mypy]
plugins = {plugin}
cache_dir = cache
check_untyped_defs = True
follow_imports = silent
ignore_missing_imports = True
"""


class Access(NamedTuple):
    """An access to an attribute.

    :ivar attribute: the class of the object and the name, as ``module.Class.name``.
    :ivar module: the module that contains the access.
    :ivar by: the class whose method contains it; ``None`` outside classes.
    """

    attribute: str
    module: str
    by: str | None


def find_accesses(folder: Path) -> set[Access]:
    """Return the accesses to all classes of the installed homeserver.

    :param folder: an empty folder, for the files of mypy.
    """
    spec = importlib.util.find_spec("synapse")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    # mypy does not analyse the code in site-packages under its own path.
    folder.joinpath("synapse").symlink_to(spec.submodule_search_locations[0])
    plugin = Path(__file__).with_name("access_plugin.py")
    folder.joinpath("mypy.ini").write_text(CONFIGURATION.format(plugin=plugin))
    found = folder.joinpath("accesses").absolute()
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "synapse"],
        cwd=folder,
        env={**os.environ, "SYNAPSE_REPLICATION_ACCESSES": str(found)},
        capture_output=True,
        text=True,
        check=False,
    )
    # Status 1 means that there are errors in types: not all libraries have types here.
    if done.returncode not in (0, 1):
        raise AssertionError(done.stdout + done.stderr)
    return {Access(*json.loads(line)) for line in found.read_text().splitlines()}


def _dotted(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class CallersTests(SynchronousTestCase):
    """Tests that compare all accesses with the replacements."""

    def setUp(self) -> None:
        if importlib.util.find_spec("mypy") is None:
            raise SkipTest("install mypy")
        folder = Path(self.mktemp())
        folder.mkdir()
        self.accesses = find_accesses(folder)

    def _missing(self, known: Substitution) -> Iterator[str]:
        """Yield the accesses to names that a replacement lacks."""
        original: Any = original_of(known)
        replacement = known.replacement_for(original)
        from synapse_replication.dropin.replaced_names import MODULES

        classes = {
            _dotted(base)
            for base in original.__mro__
            if base.__module__.startswith("synapse.")
        }
        ours = instance_attributes(replacement)
        for access in sorted(self.accesses, key=str):
            cls, _, name = access.attribute.rpartition(".")
            if cls not in classes or access.by in classes | HELPERS | replaced():
                continue
            if access.by is None and access.module in MODULES:
                # Functions and tables of a module that is replaced as a whole.
                continue
            try:
                inspect.getattr_static(replacement, name)
            except AttributeError:
                if name not in ours:
                    yield f"{access.attribute} in {access.module}, {access.by}"

    def test_every_access(self) -> None:
        """
        Every attribute that a module of the homeserver reads from a replaced object
        exists in its replacement.
        """
        classes = [
            known for known in substitutions() if isinstance(original_of(known), type)
        ]
        self.assertGreater(len(classes), 20)
        # Some accesses that must be found, so that the analysis is known to work.
        found = {access.attribute for access in self.accesses}
        handler = "synapse.replication.tcp.handler.ReplicationCommandHandler"
        self.assertLessEqual(
            {
                f"{handler}.send_new_active_task",
                f"{handler}.send_user_sync",
                "synapse.replication.tcp.external_cache.ExternalCache.get",
                "synapse.storage.util.id_generators.MultiWriterIdGenerator.get_next",
            },
            found,
        )
        missing = [text for known in classes for text in self._missing(known)]
        self.assertEqual(missing, [], "\n" + "\n".join(missing))


def replaced() -> set[str]:
    """Return the replaced classes, which read one another's attributes."""
    return {str(known) for known in substitutions()}
