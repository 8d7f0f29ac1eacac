"""Which start of each process is the present one, and which was handled.

Theory of operation: a process that starts again has another epoch. The newest that was
heard of a name is the present one, and those before it are *stale*: what they still
say is not acted on. A stale one that goes on talking is a second process of that name.
If the present one has gone, or is silent for long, the stale one is the one that is
left, and takes its place.

Bounded: beyond a thousand names, the oldest are forgotten. An instance that seems to
start again more often than any does is taken for several of one name: of its new
epochs only some are accepted.

What a process held in memory went with its start. So of a stream in memory it is kept,
too, of which epoch the rows are that were handled (:class:`HandledEpochs`). Whenever
the present one is another, or it is not known of which they are, all is fetched anew;
that is decided by the state and not by the news, which may be lost.
"""

from __future__ import annotations

import enum
from collections import deque

import attrs

from synapse_replication.handlers.interfaces import EpochSink, RowSink
from synapse_replication.recent import RecentDict

__all__ = ["EpochStatus", "HandledEpochs", "PeerEpochs"]

#: How many instances are remembered.
MAX_INSTANCES = 1000
#: How many earlier epochs of each.
MAX_STALE = 8
#: How often an instance may start again at once, and then once in how many s. Each time
#: costs that all of its streams in memory are fetched.
MAX_CHANGES = 5
CHANGE_EVERY = 10.0
#: A stale epoch that talks after so long is no late message but a process, s.
SETTLED_AFTER = 1.0
#: The present epoch is taken to be gone when it was silent for so long while a stale
#: one talks, s: a little longer than a process that is idle is silent.
SILENT_AFTER = 6.0
#: The same of one that said nothing more after its first second: a process that starts
#: does, a message that somebody made up does not.
UNCONFIRMED_AFTER = 4.0


class EpochStatus(enum.Enum):
    """What an epoch is, when it is heard."""

    FIRST = "first"  #: nothing was known of the instance
    SAME = "same"
    NEW = "new"  #: the instance started again
    LATE = "late"  #: of an earlier start; it may have been under way
    DUPLICATE = "duplicate"  #: of an earlier start, which still runs


@attrs.define
class _Peer:
    epoch: str
    since: float
    heard: float
    has_backlog: bool = True
    is_gone: bool = False
    stale: deque[str] = attrs.Factory(lambda: deque(maxlen=MAX_STALE))
    changes: float = MAX_CHANGES

    def is_silent(self, now: float) -> bool:
        """Return whether a stale epoch that talks is rather the one that runs."""
        is_confirmed = self.heard - self.since >= SETTLED_AFTER
        return now - self.heard > (SILENT_AFTER if is_confirmed else UNCONFIRMED_AFTER)

    def may_change(self, now: float) -> bool:
        """Return whether another start is plausible; if so, count it."""
        earned = (now - self.since) / CHANGE_EVERY
        left = min(MAX_CHANGES, self.changes + earned)
        if left < 1:
            return False
        self.changes = left - 1
        return True


class PeerEpochs:
    """The epochs of all other processes, as far as they told.

    Outlives connections: a process that comes back to the channel is the same.
    """

    def __init__(self) -> None:
        self._peers: RecentDict[str, _Peer] = RecentDict(MAX_INSTANCES)

    def epoch_of(self, instance_name: str) -> str | None:
        """Return the present epoch; ``None`` if it is not known or has gone."""
        peer = self._peers.get(instance_name)
        return None if peer is None or peer.is_gone else peer.epoch

    def has_backlog(self, instance_name: str) -> bool:
        """Return whether a process that speaks keeps what it sent last."""
        peer = self._peers.get(instance_name)
        return peer is not None and peer.has_backlog

    def observe(
        self, instance_name: str, epoch: str, now: float, *, has_backlog: bool = True
    ) -> EpochStatus:
        """Record that a process spoke.

        :param now: monotonic, s.
        :param has_backlog: it can be asked for what it sent last.
        """
        peer = self._peers.pop(instance_name, None)
        if peer is None:
            peer, heard = _Peer(epoch, now, now), EpochStatus.FIRST
        elif epoch == peer.epoch:
            heard = EpochStatus.SAME
        elif epoch in peer.stale and not peer.is_gone and not peer.is_silent(now):
            is_late = now - peer.since < SETTLED_AFTER
            self._peers[instance_name] = peer
            return EpochStatus.LATE if is_late else EpochStatus.DUPLICATE
        elif epoch not in peer.stale and not peer.may_change(now):
            self._peers[instance_name] = peer
            return EpochStatus.DUPLICATE
        else:
            if epoch in peer.stale:
                peer.stale.remove(epoch)
            peer.stale.append(peer.epoch)
            peer.epoch, peer.since = epoch, now
            heard = EpochStatus.NEW
        peer.heard = now
        peer.has_backlog = has_backlog
        peer.is_gone = False
        # The one heard longest ago stands first.
        self._peers[instance_name] = peer
        return heard

    def leave(self, instance_name: str, epoch: str) -> None:
        """Record that a process said goodbye."""
        peer = self._peers.get(instance_name)
        if peer is not None and peer.epoch == epoch:
            peer.is_gone = True


class HandledEpochs:
    """Of which epoch of each writer the rows of a stream are that were handled here.

    They outlive this process if its sink is an
    :class:`~synapse_replication.handlers.interfaces.EpochSink`. A writer's position is
    of the epoch that is noted here, or the writer is of another one by now: what
    follows from the epoch that one has heard may always be handled first.
    """

    def __init__(self, stream_name: str, sink: RowSink) -> None:
        self._name = stream_name
        self._sink = sink if isinstance(sink, EpochSink) else None
        # What is evicted is fetched anew.
        self._epochs: RecentDict[str, str] = RecentDict(MAX_INSTANCES)
        if self._sink is not None:
            self._epochs |= {
                writer: epoch
                for (stream, writer), epoch in self._sink.saved_epochs().items()
                if stream == stream_name
            }

    def is_present(self, instance_name: str, epoch: str) -> bool:
        """Return whether what was handled of a writer is of this epoch."""
        return self._epochs.get(instance_name) == epoch

    async def begin(self, instance_name: str, epoch: str) -> None:
        """Record that nothing was handled yet of this epoch, and now will be.

        The sink's failure is raised; nothing has changed then.
        """
        if self._sink is not None:
            waiting = self._sink.on_epoch(self._name, instance_name, epoch)
            if waiting is not None:
                await waiting
        self._epochs[instance_name] = epoch
