"""A registry of a host's id generators, for comparing positions with sequences.

A host's streams have no reference to their id generators, so the generators register
themselves here.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from synapse_replication.storage.id_generators import MultiWriterIdGenerator

#: The generators by instance name and sequence name.
generators: WeakValueDictionary[tuple[str, str], MultiWriterIdGenerator] = (
    WeakValueDictionary()
)
