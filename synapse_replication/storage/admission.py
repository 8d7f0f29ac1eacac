"""The right of a process to write under its name, which PostgreSQL checks.

Theory of operation: the table ``synapse_replication_writers`` counts how often a name
was acquired; the count is the *term* of the process that acquired it last. Each
statement or transaction that writes under the name passes its term to the function
``synapse_replication_admit``, in a statement that is sent anyway:

- with the COMMIT of a transaction. If the transaction has written, the function shares
  an advisory lock until the transaction has ended. A process that acquires the name
  afterwards acquires that lock exclusively, so it waits for commits in progress, and
  all others fail;
- with the allocation of ids, and with a read of the sequence. The term is read after
  these, with a newer snapshot: if the name is still held, it was held when the sequence
  had that value. The ids of the next holder are greater. A process therefore announces
  no position at or above an id of its successor, however long it was suspended;
- with the stored position.

No clock is involved. A process that was suspended, or cut off from the database, finds
out when it resumes: PostgreSQL refuses what it tries to commit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from synapse_replication.errors import NameLostError
from synapse_replication.storage import queries
from synapse_replication.storage.prepared import Prepared

if TYPE_CHECKING:
    import psycopg2

#: The SQLSTATE of the function, if another process has acquired the name.
NAME_LOST = "SR001"


@attrs.frozen
class Admission:
    """A name that this process has acquired.

    :ivar instance_name: the name.
    :ivar term: how often the name had been acquired when this process acquired it.
    :ivar check: checks the name, before a commit.
    """

    instance_name: str
    term: int
    check: Prepared = attrs.field(init=False)

    @check.default
    def _make_check(self) -> Prepared:
        name = queries.literal(self.instance_name).replace("%", "%%")
        return Prepared(f"SELECT synapse_replication_admit({name}, {self.term})", {})

    @property
    def parameters(self) -> dict[str, Any]:
        """The parameters of statements that check the name."""
        return {"writer": self.instance_name, "term": self.term}

    def confirm(self, txn: Any) -> None:
        """Check now that the name is still held.

        :param txn: a cursor, which raises an error that :meth:`explain` recognises.
        """
        txn.execute(queries.SQL["admit"], self.parameters)

    def explain(self, error: psycopg2.Error) -> NameLostError | None:
        """Return the error that another process has the name, if that is the reason."""
        if error.pgcode != NAME_LOST:
            return None
        holder = str(error).partition("\n")[0].strip()
        return NameLostError(self.instance_name, holder)
