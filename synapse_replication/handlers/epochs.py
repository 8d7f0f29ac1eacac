"""Tracks each instance's current epoch.

Theory of operation: a process that restarts has a new epoch. An instance name has one
*current* epoch, usually the newest that was observed. Epochs that were current before
are *stale*, and messages with them are ignored. If messages with a stale epoch continue
to arrive, a second process of the same name seems to run. After a goodbye with the
current epoch, or some seconds without any message with the current epoch, the next
message with a stale epoch makes that epoch current again.

Bounds: beyond a thousand names, the least recently seen name is evicted. A name whose
epoch changes implausibly often is treated as that of several processes: its new epochs
are accepted only at a limited rate.

See docs/failure-modes.rst: failure-duplicate-instance.
"""

from __future__ import annotations

import enum
from collections import deque

import attrs

from synapse_replication.recent import RecentDict

#: The largest number of instances that are tracked.
MAX_INSTANCES = 1000
#: The largest number of stale epochs that are tracked for each instance.
MAX_STALE = 8
#: The largest number of changes of an instance's epoch in a burst. Each change costs a
#: catch-up of all streams that the instance holds in memory.
MAX_CHANGES = 5
#: The interval at which further changes are allowed after a burst, in s. It is shorter
#: than the time in which a homeserver starts, so that one process that fails and
#: restarts again and again is not mistaken for several processes.
EPOCH_CHANGE_INTERVAL = 3.0
#: The longest delay of a message, in s. If the epoch changed longer ago than this, and
#: a message with a stale epoch arrives, the process of that epoch is still running.
SETTLED_AFTER = 1.0
#: The interval of the heartbeats of an idle instance that states no other, in s.
USUAL_INTERVAL = 5
#: By how much a message may be later than the interval of heartbeats, in s. If it is
#: even later, a stale epoch can replace the current one.
HEARTBEAT_TOLERANCE = 1.0
#: How long an instance that states no interval is remembered to expect the usual one of
#: its peers, in s.
EXPECTS_FOR = 60.0
#: The limit that replaces ``silent_after``, in s, if all messages with the current
#: epoch arrived within one second. It is shorter, because these may be forged.
UNCONFIRMED_AFTER = 4.0


class EpochStatus(enum.Enum):
    """Meaning of the epoch in a received message."""

    FIRST = "first"  #: the instance was not known
    SAME = "same"
    NEW = "new"  #: the instance restarted, or a stale epoch is current again
    LATE = "late"  #: stale; the message may have been delayed
    DUPLICATE = "duplicate"  #: another process of the same name seems to run


@attrs.define
class _Peer:
    epoch: str
    since: float
    last_seen: float
    has_backlog: bool = True
    said_goodbye: bool = False
    stale: deque[str] = attrs.field(factory=lambda: deque(maxlen=MAX_STALE))
    changes_left: float = MAX_CHANGES
    heartbeat_interval: int | None = None
    can_watch: bool = False
    #: When a stale epoch spoke for the first time since the last message.
    contradicted_at: float | None = None

    @property
    def silent_after(self) -> float:
        """The time without a message after which an instance is silent, in s."""
        return (self.heartbeat_interval or USUAL_INTERVAL) + HEARTBEAT_TOLERANCE

    def may_be_replaced(self, now: float) -> bool:
        """Return whether a stale epoch in a message should replace the current one.

        However long the interval that a message with the current epoch stated, its
        process contradicts the stale one, or it does not exist.
        """
        is_confirmed = self.last_seen - self.since >= SETTLED_AFTER
        limit = self.silent_after if is_confirmed else UNCONFIRMED_AFTER
        if self.said_goodbye or now - self.last_seen > limit:
            return True
        at = now if self.contradicted_at is None else self.contradicted_at
        return now - at > USUAL_INTERVAL + HEARTBEAT_TOLERANCE

    def take_change(self, now: float) -> bool:
        """Return whether another restart is plausible; if so, count it."""
        earned = (now - self.since) / EPOCH_CHANGE_INTERVAL
        left = min(MAX_CHANGES, self.changes_left + earned)
        if left < 1:
            return False
        self.changes_left = left - 1
        return True


class PeerEpochs:
    """The epochs of all peers that speak the extension.

    This object outlives connections, because a peer that reconnects has the same epoch.
    """

    def __init__(self) -> None:
        self._peers: RecentDict[str, _Peer] = RecentDict(MAX_INSTANCES)

    def epoch_of(self, instance_name: str) -> str | None:
        """Return the current epoch; ``None`` if the peer is unknown or said goodbye."""
        peer = self._peers.get(instance_name)
        return None if peer is None or peer.said_goodbye else peer.epoch

    def is_reporting(self, instance_name: str, now: float) -> bool:
        """Return whether a peer speaks the extension, and is not silent."""
        peer = self._peers.get(instance_name)
        if peer is None or peer.said_goodbye:
            return False
        return now - peer.last_seen <= peer.silent_after

    def __len__(self) -> int:
        return len(self._peers)

    def expect_usual_interval(self, now: float) -> bool:
        """Return whether a peer regards one as gone that is silent for 15 s."""
        return any(
            peer.heartbeat_interval is None
            and not peer.said_goodbye
            and now - peer.last_seen < EXPECTS_FOR
            for peer in self._peers.values()
        )

    def all_can_watch(self, now: float) -> bool:
        """Return whether each living peer can watch others, and understands it."""
        return all(
            peer.can_watch
            or peer.said_goodbye
            or now - peer.last_seen > max(EXPECTS_FOR, 3 * peer.silent_after)
            for peer in self._peers.values()
        )

    def living_watchers(self, now: float) -> list[str]:
        """Return the living peers that can watch others."""
        return [
            name
            for name, peer in self._peers.items()
            if peer.can_watch
            and not peer.said_goodbye
            and now - peer.last_seen <= 3 * peer.silent_after
        ]

    def fell_silent(self, instance_name: str, epoch: str, last_heard: float) -> bool:
        """Record that the current epoch of a peer has been silent for a while.

        :param last_heard: when it was last heard, in s.
        :return: whether ``epoch`` is the peer's current epoch.
        """
        peer = self._peers.get(instance_name)
        if peer is None or peer.epoch != epoch or peer.said_goodbye:
            return False
        peer.last_seen = max(peer.last_seen, last_heard)
        peer.heartbeat_interval = USUAL_INTERVAL
        return True

    def has_backlog(self, instance_name: str) -> bool:
        """Return whether a peer retains a backlog; false if it is unknown."""
        peer = self._peers.get(instance_name)
        return peer is not None and peer.has_backlog

    def record_message(
        self,
        instance_name: str,
        epoch: str,
        now: float,
        *,
        has_backlog: bool = True,
        heartbeat_interval: int | None = None,
        can_watch: bool = False,
    ) -> EpochStatus:
        """Record a message of a peer, and return the meaning of its epoch.

        A message with the status LATE or DUPLICATE is not recorded.

        :param now: the time of the host's clock, in s.
        :param has_backlog: whether the peer retains a backlog.
        :param heartbeat_interval: the stated interval of the peer's heartbeats, in s.
        :param can_watch: whether the peer can watch others.
        """
        peer = self._peers.pop(instance_name, None)
        if peer is None:
            peer, status = _Peer(epoch, now, now), EpochStatus.FIRST
        elif epoch == peer.epoch:
            status = EpochStatus.SAME
        elif epoch in peer.stale and not peer.may_be_replaced(now):
            is_late = now - peer.since < SETTLED_AFTER
            if not is_late and peer.contradicted_at is None:
                peer.contradicted_at = now
            self._peers[instance_name] = peer
            return EpochStatus.LATE if is_late else EpochStatus.DUPLICATE
        elif epoch not in peer.stale and not peer.take_change(now):
            self._peers[instance_name] = peer
            return EpochStatus.DUPLICATE
        else:
            if epoch in peer.stale:
                peer.stale.remove(epoch)
            peer.stale.append(peer.epoch)
            peer.epoch, peer.since = epoch, now
            status = EpochStatus.NEW
        peer.last_seen = now
        peer.has_backlog = has_backlog
        peer.heartbeat_interval = heartbeat_interval
        peer.can_watch = can_watch
        peer.said_goodbye = False
        peer.contradicted_at = None
        # Insert the peer last: the order is by the time of the last message.
        self._peers[instance_name] = peer
        return status

    def leave(self, instance_name: str, epoch: str) -> None:
        """Record a peer's goodbye, if ``epoch`` is the peer's current epoch."""
        peer = self._peers.get(instance_name)
        if peer is not None and peer.epoch == epoch:
            peer.said_goodbye = True
