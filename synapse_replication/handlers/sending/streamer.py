"""The streamer: turns notifications of writes into RDATA and POSITION.

Theory of operation: a notification starts a loop or, if the loop is running, causes
another round. A notification does not name its stream, so the round that follows it
visits all streams that this instance writes; any other round visits only the streams
that had more rows. A round sends a slice of each stream's rows, and the loop ends when
no stream has more rows. A stream with many pending rows therefore delays the others by
at most one slice. Rows that were fetched beyond a slice are sent in the next round.
While a link is behind, streams with more than a slice are paused, so that their rows do
not delay the other streams. If all remaining streams are paused, the loop ends; it is
restarted when the link is ready again, or lost.

This instance's token of the stream is read once, *before* the rows are fetched, and the
POSITION after these rows announces at most that token. Every row of this instance at or
below it is already committed, so no row can appear later in a range that was announced
as empty. Comparing tokens that were read at different times could lose rows.

A row that cannot be sent, because the database returns it as invalid JSON (a lone
surrogate, say), is skipped and reported, so that it does not stop the rows after it.

The streams are also checked at a fixed interval (by default, every second), because an
idle writer's token advances with the tokens of other writers, and so that failed sends
are retried.

See docs/failure-modes.rst: failure-covered-rows, failure-idle-writer,
failure-id-without-row.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import attrs
from msgspec.structs import replace

from synapse_replication.errors import LocalProtocolError, ReplicationError
from synapse_replication.handlers.events import (
    BackgroundTask,
    Discarded,
    DiscardReason,
    SendingFailed,
)
from synapse_replication.handlers.interfaces import ReplicationHost
from synapse_replication.handlers.observer import ReplicationObserver
from synapse_replication.handlers.sending.command_sender import CommandSender
from synapse_replication.handlers.timer import Timer
from synapse_replication.handlers.waiters import Waiters
from synapse_replication.streams.pages import Page, gather_batches, to_page
from synapse_replication.streams.rows import compact_json_rows, encode_json_rows
from synapse_replication.streams.stream import JsonValue, Stream

#: The time after which streams are checked again if something is left to do, for
#: instance rows that could not be fetched, in s.
RETRY_SECONDS = 1.0

_DESCRIPTION = "replication_streamer"
_TASK = BackgroundTask(_DESCRIPTION)


@attrs.frozen
class StreamerOptions:
    """Options of a streamer.

    :ivar announce_interval: the interval at which idle streams are checked, in s.
    :ivar max_rows: the maximum number of rows in a slice. Only the rest of the slice's
        last batch may exceed it, because a batch is never split.
    :ivar torture_level: for tests. If it is not 0, the streams are sent in random
        order, each after a random delay of up to this number of ms.
    """

    announce_interval: float = 1.0
    max_rows: int = 250
    torture_level: int = 0


class ReplicationStreamer:
    """Sender of the rows that this instance writes.

    Use it in the reactor's thread only. It is inactive until :meth:`start`.
    """

    def __init__(
        self,
        host: ReplicationHost,
        sender: CommandSender,
        observer: ReplicationObserver,
        *,
        options: StreamerOptions | None = None,
        random_source: random.Random | None = None,
    ) -> None:
        self._host = host
        self._sender = sender
        self._observer = observer
        self._options = options or StreamerOptions()
        self._random = random_source or random.Random()
        self._streams = host.streams.get_streams_to_replicate()
        self._poked = False
        self._running = False
        # The streams that had more than a slice to send in the last round.
        self._unfinished: list[Stream] = []
        # The streams that could not be sent since the last round of all streams.
        self._failed: list[Stream] = []
        # By stream name: the token up to which rows were sent, and the rows that were
        # fetched beyond the slice.
        self._partial_pages: dict[str, tuple[int, Page]] = {}
        self._waiters = Waiters()
        self._tick = Timer(host.clock)
        self._tick_due = 0.0
        sender.call_when_ready(self._resume)

    def start(self) -> None:
        """Subscribe to the notifier, and start the checks of idle streams.

        If they have been started, do nothing.
        """
        if self._tick.is_running:
            return
        self._host.notifier.add_replication_callback(self.on_notifier_poke)
        self._poll()

    async def stop(self) -> None:
        """Send the rows written so far, and stop the checks of idle streams.

        :raises ReplicationError: if the rows of a stream could not be sent; the
            observer has received the reason.
        """
        self._tick.stop()
        self.on_notifier_poke()
        if not self._has_finished():
            await self._waiters.add()
        unsent = [
            stream.description.name
            for stream in self._failed
            if self._sender.has_consumers(stream.description.name)
            and self._must_send(stream)
        ]
        if unsent:
            names = ", ".join(unsent)
            raise ReplicationError(
                f"rows of {names} were not sent, see the errors reported before"
            )

    def _poll(self) -> None:
        # Reschedule first, so that an exception cannot stop the timer.
        self._poll_later(self._options.announce_interval)
        self.on_notifier_poke()

    def _poll_later(self, delay: float) -> None:
        self._tick_due = self._host.clock.seconds() + delay
        self._tick.start(delay, self._poll)

    def retry_soon(self) -> None:
        """Check the streams again after :data:`RETRY_SECONDS` at the latest."""
        left = self._tick_due - self._host.clock.seconds()
        if self._tick.is_running and left > RETRY_SECONDS:
            self._poll_later(RETRY_SECONDS)

    def on_notifier_poke(self) -> None:
        """Start sending new rows. The call is cheap, and may be made at any time."""
        if self._running:
            self._poked = True
            return
        if not self._sender.connected():
            for stream in self._streams:
                if not self._sender.has_consumers(stream.description.name):
                    self._skip_to_current(stream)
        # CommandSender.stream_update() may have sent all rows of an unfinished stream
        # since the last round. Start the loop nevertheless; it detects this.
        if self._unfinished or any(map(self._must_send, self._streams)):
            self._poked = True
            self._start()
        else:
            self._notify_if_idle()

    def _has_finished(self) -> bool:
        return not (self._running or self._unfinished)

    def _notify_if_idle(self) -> None:
        if self._waiters and self._has_finished():
            # Notify in a later reactor turn, because the caller may be sending rows.
            self._host.clock.call_later(0, self._notify_waiters)

    def _notify_waiters(self) -> None:
        if self._has_finished():
            self._waiters.fire()

    def _skip_to_current(self, stream: Stream) -> None:
        """Skip a stream's rows up to its current token, as it has no consumers."""
        name = stream.description.name
        self._partial_pages.pop(name, None)
        if stream in self._unfinished:
            self._unfinished.remove(stream)
        self._sender.set_last_sent_token(name, stream.minimal_local_current_token())

    def _resume(self) -> None:
        """Resume paused streams, because a link is ready again or was lost."""
        if self._unfinished and not self._running:
            self.on_notifier_poke()

    def _start(self) -> None:
        self._running = True
        self._host.run_as_background_process(_DESCRIPTION, self._run)

    def _must_send(self, stream: Stream) -> bool:
        last_sent = self._sender.last_sent_token(stream)
        token = stream.minimal_local_current_token()
        return token > last_sent or (token < last_sent and _may_reset(stream))

    async def _run(self) -> None:
        try:
            with self._observer.span(_TASK):
                while self._poked or self._can_continue():
                    streams = self._unfinished
                    if self._poked:
                        streams = list(self._streams)
                        self._failed.clear()
                    self._poked = False
                    paused = self._unfinished if self._sender.is_behind() else []
                    self._unfinished = paused + await self._send_round(
                        [stream for stream in streams if stream not in paused]
                    )
                    if self._can_continue():
                        await self._host.clock.sleep(0)
        finally:
            self._running = False
            self._notify_if_idle()

    def _can_continue(self) -> bool:
        return bool(self._unfinished) and not self._sender.is_behind()

    async def _send_round(self, streams: list[Stream]) -> list[Stream]:
        """Send a slice of each stream; return the streams that have more rows."""
        torture = self._options.torture_level
        if torture:
            self._random.shuffle(streams)
        unfinished = []
        for stream in streams:
            if torture:
                await self._host.clock.sleep(self._random.random() * torture / 1000)
            try:
                if self._has_work(stream) and await self._send_slice(stream):
                    unfinished.append(stream)
            except Exception as error:  # noqa: BLE001 -- reported to the observer
                self._failed.append(stream)
                self._observer.observe(SendingFailed(stream.description.name, error))
                self.retry_soon()
        return unfinished

    def _has_work(self, stream: Stream) -> bool:
        # Most streams have no work; this check is cheaper than starting a coroutine.
        return stream.description.name in self._partial_pages or self._must_send(stream)

    async def _send_slice(self, stream: Stream) -> bool:
        """Send at most one slice of a stream; return whether it has more rows."""
        name = stream.description.name
        if not self._sender.has_consumers(name):
            self._skip_to_current(stream)
            return False
        # Read the token once, before the rows are fetched; see the module's docstring.
        upto_token = stream.minimal_local_current_token()
        last_sent = self._sender.last_sent_token(stream)
        sent_before, page = self._partial_pages.pop(name, (last_sent, None))
        if upto_token < last_sent and _may_reset(stream):
            # The stream was reset while this process was running.
            self._sender.send_position(name, upto_token, upto_token)
            return False
        if upto_token <= last_sent:
            return False
        if page is None or sent_before != last_sent:
            if not stream.has_local_updates(last_sent, upto_token):
                self._announce(stream, last_sent, upto_token)
                return False
            result = await stream.get_updates_since(
                self._host.identity.instance_name, last_sent, upto_token
            )
            page = to_page(result, last_sent, upto_token, allow_encoded=True)
        remaining = self._send_rows(stream, page)
        if remaining is not None:
            if not _may_reset(stream):
                sent_upto = self._sender.last_sent_token(stream)
                self._partial_pages[name] = sent_upto, remaining
            return True
        reached = page.upto_token
        self._announce(stream, self._sender.last_sent_token(stream), reached)
        return reached < upto_token

    def _send_rows(self, stream: Stream, page: Page) -> Page | None:
        """Send the first slice of a page; return the remaining rows, if any."""
        name = stream.description.name
        tokens, rows = page.tokens, page.values
        remaining = None
        if len(tokens) > self._options.max_rows:
            end = bisect_right(tokens, tokens[self._options.max_rows - 1])
            if end < len(tokens):
                remaining = replace(page, tokens=tokens[end:], values=rows[end:])
                tokens, rows = tokens[:end], rows[:end]
        try:
            texts = _encode_rows(rows, page.is_encoded)
        except ValueError:
            batches = gather_batches(tokens, rows)
            self._send_valid(stream, batches, page.is_encoded)
        else:
            self._sender.send_rows(name, list(gather_batches(tokens, texts)))
        return remaining

    def _send_valid(
        self,
        stream: Stream,
        batches: Iterable[tuple[int, list[JsonValue]]],
        are_encoded: bool,
    ) -> None:
        """Send those batches that are valid JSON; skip and report the others."""
        name = stream.description.name
        valid: list[tuple[int, list[bytes]]] = []
        for token, rows in batches:
            try:
                valid.append((token, _encode_rows(rows, are_encoded)))
            except ValueError as error:
                # Announce the batch's token instead: the readers then fetch the batch,
                # deliver its valid rows, and report the others, too.
                self._sender.send_rows(name, valid)
                valid = []
                self._sender.send_position(name, token, token)
                self._report_skipped(stream, token, rows, are_encoded, error)
        self._sender.send_rows(name, valid)

    def _report_skipped(
        self,
        stream: Stream,
        token: int,
        rows: list[JsonValue],
        are_encoded: bool,
        error: ValueError,
    ) -> None:
        description = stream.description
        invalid = sum(not _is_valid(row, are_encoded) for row in rows)
        self._observer.observe(
            Discarded(
                description.name,
                self._host.identity.instance_name,
                DiscardReason.SKIPPED,
                invalid,
            )
        )
        where = description.describe_row(token)
        self._observer.failure(
            f"sending a row of {description.name}",
            LocalProtocolError(f"{where} was skipped: {error}"),
        )

    def _announce(self, stream: Stream, last_sent: int, upto_token: int) -> None:
        description = stream.description
        if upto_token > last_sent:
            # Ids without rows, for instance after a rollback, are announced, too. The
            # exception is a stream whose writers announce only their own rows' tokens.
            if description.announce_own_moves_only and not stream.has_local_updates(
                last_sent, upto_token
            ):
                self._sender.skip_range(description.name, last_sent, upto_token)
            else:
                self._sender.send_position(description.name, last_sent, upto_token)


def _encode_rows(rows: Sequence[JsonValue], are_encoded: bool) -> list[bytes]:
    """Return the JSON texts of rows, each in one line.

    :raises ValueError: if a row is not valid JSON, or cannot be encoded as JSON.
    """
    # PostgreSQL returns a text of type "json" as it was written, line ends included.
    return compact_json_rows(rows) if are_encoded else encode_json_rows(rows)


def _is_valid(row: JsonValue, is_encoded: bool) -> bool:
    try:
        _encode_rows([row], is_encoded)
    except ValueError:
        return False
    return True


def _may_reset(stream: Stream) -> bool:
    return stream.description.resettable
