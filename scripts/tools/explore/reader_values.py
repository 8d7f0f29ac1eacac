"""What the exploration has to know about a reader, and only the reader knows itself.

No other module of the exploration sees what is private in a reader.
"""

from __future__ import annotations

from synapse_replication.streams.reader import Reader


def can_act_during_fetch(reader: Reader) -> bool:
    """Return whether a reader has an action that it can take before a page comes."""
    catch_up = reader._catch_up
    begins_epoch = catch_up is not None and (
        catch_up.epoch is not None and catch_up.rewind_to is None
    )
    must_ask = any(link.must_ask for link in reader._links.values())
    return begins_epoch or must_ask or bool(reader._reports)
