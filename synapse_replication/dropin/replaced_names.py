"""The names of Synapse that are replaced, with their signatures: the rows of a table.

The names, and the parameters that ``inspect.signature`` returns, were read from
installed packages.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from synapse_replication.data_files import read_table
from synapse_replication.dropin.substitution import Substitution

#: The versions of matrix-synapse with which this table was tested.
TESTED_VERSIONS: Final = ("1.153.0", "1.163.0", "1.163.1", "1.163.2")

#: The parts that an operator can select, each with its description.
PARTS: Final = {
    "commands": "the commands of the protocol",
    "protocol": "both ends of a direct TCP connection",
    "handler": "the command handler and the streamer",
    "notifier": "the notifications of changed streams within a process",
    "redis": "connections to Redis",
    "backlog": "recently sent rows, retained for readers that missed them",
    "external_cache": "the cache in Redis that all processes share",
    "ids": "ids and positions in the database",
}


def _read_substitution(row: Mapping[str, str]) -> Substitution:
    """Return a substitution; the names are relative to ``synapse`` and this package."""
    module, _, name = row["Name"].partition(":")
    signatures = row["Signatures"].splitlines()
    # Signatures that begin with a name are those of methods.
    methods = [each for each in signatures if not each.startswith("(")]
    return Substitution(
        part=row["Part"],
        module=f"synapse.{module}",
        name=name,
        replacement=f"synapse_replication.{row['Replacement']}",
        shapes=tuple(each for each in signatures if each not in methods),
        methods={each[: each.index("(")]: each[each.index("(") :] for each in methods},
        extends=row["Extends"] == "yes",
    )


SUBSTITUTIONS: Final = tuple(
    map(_read_substitution, read_table(Path(__file__).with_suffix(".csv")))
)
