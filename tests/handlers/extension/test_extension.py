"""Tests of epochs, heartbeats, gap detection and partial resync between instances."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from synapse_replication import __version__
from synapse_replication.handlers.epochs import EPOCH_CHANGE_INTERVAL, MAX_CHANGES
from synapse_replication.handlers.events import PeerHeartbeat, Resync
from synapse_replication.testing.doubles import MemoryConnection
from tests.handlers.extended import Bus, BusConnection, ExtensionProcess, Published
from tests.handlers.extension.extension_case import ExtensionTests, row, rows_of


class HeartbeatTests(ExtensionTests):
    def test_heartbeats_are_reported(self) -> None:
        """A heartbeat is reported to the observer, with the age of its positions."""
        self.inject(
            time=20_000,
            where="host:1",
            version="1.2",
            positions={"events": [7, 12_500]},
        )
        self.assertEqual(
            self.reader.observer.heartbeats[-1],
            PeerHeartbeat("w", "w-epoch", "1.2", "host:1", False, {"events": (7, 7.5)}),
        )
        self.inject(type="goodbye")
        self.assertTrue(self.reader.observer.heartbeats[-1].is_leaving)

    def test_version_in_messages(self) -> None:
        """The messages of an instance carry its version."""
        self.assertEqual(self.reader.observer.heartbeats[-1].version, __version__)

    def test_late_and_chunks(self) -> None:
        """Stale messages and messages ahead of rows are not reported as heartbeats."""
        self.bus.advance(2)
        count = len(self.reader.observer.heartbeats)
        self.inject(epoch="another")
        self.inject()
        self.inject(type="rows", epoch="another", positions={"events": [7, 0]})
        self.assertEqual(
            [heartbeat.epoch for heartbeat in self.reader.observer.heartbeats[count:]],
            ["another"],
        )

    def test_direct_link_that_is_lost_again_and_again(self) -> None:
        """The hellos on one direct link do not replace the heartbeats on another."""
        extension, connection = self.reader.extension, self.reader.connection
        assert extension is not None
        assert connection is not None
        connection.is_direct = True
        self.bus.advance(60)
        self.bus.seen.clear()
        for _ in range(5):
            other = BusConnection(Bus(), "r")
            other.is_direct = True
            extension.extension_up(other)
            self.bus.advance(4)
            extension.extension_down(other)
        senders = [message.sender for message in self.messages("heartbeat")]
        self.assertGreaterEqual(senders.count("r"), 3)


class GapTests(ExtensionTests):
    def test_no_loss_no_fetch(self) -> None:
        """If no row is lost, heartbeats and announced row ranges cause no catch-up."""
        for token in range(1, 20):
            self.write(token)
            self.bus.advance(0.5)
        self.writer.skip(30)
        self.bus.advance(6)
        self.assertEqual(self.reader.texts(), [row(n) for n in range(1, 20)])
        self.assertEqual(self.reader.events.requests, [])
        self.assertEqual(self.writer.backlog_requests, [])
        self.assertEqual(self.reader.observer.gaps, [])
        self.assertEqual(self.reader.events.current_token("w"), 30)

    def test_lost_row_is_fetched_before_the_next(self) -> None:
        """A lost row is fetched before the row after it is delivered."""
        self.write(1)
        self.bus.drop = rows_of(2)
        self.write(2, 3)
        self.assertEqual(self.reader.texts(), [row(1), row(2), row(3)])
        self.assertEqual(self.reader.observer.gaps, [("events", "w", 1, 2)])
        self.assertEqual(self.writer.backlog_requests, [("events", 1, 2)])
        self.assertEqual(self.reader.events.requests, [])

    def test_stock_reader_misses_a_loss(self) -> None:
        """A reader without the extension does not notice the loss of a row."""
        stock = ExtensionProcess(self.bus, "s", speaks=False)
        self.bus.deliver()
        self.write(1)
        self.bus.drop = rows_of(2)
        self.write(2, 3)
        self.assertEqual(stock.texts(), [row(1), row(3)])

    def test_last_row_is_lost(self) -> None:
        """A heartbeat reveals the loss of a writer's last row within about 1 s."""
        self.bus.drop = rows_of(2)
        self.write(1, 2)
        self.assertEqual(self.reader.texts(), [row(1)])
        self.bus.advance(1.25)
        self.assertEqual(self.reader.texts(), [row(1), row(2)])

    def test_lost_position(self) -> None:
        """If the POSITION of a writer was lost, a heartbeat makes the writer live."""
        late = ExtensionProcess(self.bus, "late")
        self.bus.drop = lambda message: message.sender == "w"
        self.bus.deliver()
        self.bus.drop = lambda message: message.payload.startswith(b"POSITION")
        self.assertNotIn(("bus", "events", "w"), late.observer.connected)
        self.bus.advance(5.25)
        self.assertIn(("bus", "events", "w"), late.observer.connected)
        self.write(1)
        self.assertEqual(late.texts(), [row(1)])

    def test_skipped_ids_before_a_heartbeat(self) -> None:
        """A heartbeat states the range without rows, as the lost POSITION did.

        The range ends at the writer's next row.
        """
        self.write(1)
        self.bus.drop = lambda message: message.payload.startswith(b"POSITION")
        self.writer.handler.sender.send_position("events", 1, 30)
        self.writer.handler.sender.skip_range("events", 30, 40)
        self.writer.handler.sender.announce_positions()
        self.bus.advance(6)
        self.assertEqual(self.reader.events.current_token("w"), 40)
        self.assertEqual(self.heartbeat()["prev"], {"events": 1})
        self.assertEqual(self.reader.observer.gaps, [])
        self.assertEqual(self.writer.backlog_requests, [])
        self.write(41)
        self.bus.advance(6)
        self.assertNotIn("prev", self.heartbeat())

    def test_backlog_of_an_idle_writer(self) -> None:
        """Announcements of a range that was announced before keep the retained rows."""
        self.write(1, 2)
        sender, backlog = self.writer.handler.sender, self.writer.backlog.of("events")
        sender.send_position("events", 2, 30)
        sender.send_position("events", 30, 40)
        sender.announce_positions()
        self.assertEqual((backlog.start, backlog.end, backlog.rows), (0, 40, 2))

    def test_range_without_rows_ends_at_unannounced_rows(self) -> None:
        """A heartbeat states no range across rows that were not sent."""
        self.write(1)
        self.writer.handler.sender.send_position("events", 1, 30)
        self.bus.advance(6)
        self.assertEqual(self.heartbeat()["prev"], {"events": 1})
        self.writer.handler.sender.set_last_sent_token("events", 35)
        self.writer.handler.sender.send_position("events", 35, 40)
        self.bus.advance(6)
        self.assertNotIn("prev", self.heartbeat())

    def heartbeat(self) -> Any:
        """Return the last heartbeat of the writer."""
        sent = [each for each in self.messages("heartbeat") if each.sender == "w"]
        return json.loads(sent[-1].payload)

    def test_heartbeat_in_a_batch(self) -> None:
        """A heartbeat between the rows of a batch neither splits nor loses it."""
        self.write(1)
        self.writer.handler.sender.stream_update("events", None, ["a"])
        self.bus.deliver()
        self.bus.advance(6)
        self.writer.handler.sender.stream_update("events", 2, ["b"])
        self.bus.deliver()
        self.assertEqual(self.reader.texts(), [row(1), ("w", 2, ["a", "b"])])

    def test_gap_before_an_unfinished_batch(self) -> None:
        """A gap found during a batch is fetched before the batch is delivered."""
        self.write(1)
        self.bus.drop = rows_of(2)
        self.write(2)
        self.writer.handler.sender.stream_update("events", None, ["a"])
        self.bus.advance(1.25)
        self.writer.handler.sender.stream_update("events", 3, ["b"])
        self.bus.deliver()
        self.assertEqual(self.reader.texts(), [row(1), row(2), ("w", 3, ["a", "b"])])

    def test_row_past_the_streamer(self) -> None:
        """A heartbeat reveals the loss of a row that was sent without the streamer."""
        self.write(1)
        self.reader.events.persist("w", 2, ["row 2"])
        self.bus.drop = rows_of(2)
        self.writer.handler.sender.stream_update("events", 2, ["row 2"])
        self.bus.advance(1.25)
        self.assertEqual(self.reader.texts(), [row(1), row(2)])

    def test_rows_still_in_the_queue(self) -> None:
        """Rows that wait in a slow reader's queue do not count as a gap."""
        self.write(1)
        self.reader.host.rows.is_held = True
        self.write(2, 3)
        self.bus.advance(6)
        self.reader.host.rows.is_held = False
        self.reader.host.rows.release()
        self.bus.advance(6)
        self.assertEqual(self.reader.texts(), [row(1), row(2), row(3)])
        self.assertEqual(self.reader.observer.gaps, [])
        self.assertEqual(self.reader.events.requests, [])

    def test_skipped_ids_cause_no_catch_up(self) -> None:
        """If a writer only skips other writers' ids, readers need no catch-up."""
        self.write(1)
        self.writer.handler.sender.skip_range("events", 1, 50)
        # The position is announced to a peer on direct TCP, but not to those on the
        # bus.
        self.writer.handler.sender.announce_positions(MemoryConnection(relays=True))
        self.bus.advance(6)
        self.assertEqual(self.reader.observer.gaps, [])
        self.assertEqual(self.reader.events.current_token("w"), 1)
        # The backlog states that no row was written in between.
        self.writer.write(51, "row 51")
        backlog = self.writer.backlog.of("events")
        self.assertEqual((backlog.start, backlog.end), (0, 51))

    def test_stock_peers_see_only_the_classic_wire(self) -> None:
        """
        The lines on the main channel are identical with and without the extension, but
        for the answers to REPLICATE of an instance that the extension answers.
        """
        classic = []
        for speaks in (False, True):
            bus = Bus()
            ExtensionProcess(bus, "r", speaks=speaks)
            writer = ExtensionProcess(bus, "w", writes=["events"], speaks=speaks)
            bus.deliver()
            for token in (1, 2, 5):
                writer.write(token, "a", "b")
                bus.advance(2)
            writer.skip(9)
            bus.advance(7)
            classic.append(bus.classic())
        rows, extended = (
            [
                line
                for line in lines
                if not re.fullmatch(r"POSITION \w+ w (\d+) \1", line)
            ]
            for lines in classic
        )
        self.assertEqual(rows, extended)
        self.assertIn("POSITION events w 0 0", classic[1])
        self.assertIn("RDATA events w batch", "".join(classic[0]))

    def test_idle_traffic_is_bounded(self) -> None:
        """
        An idle writer sends one heartbeat every 5 s; an instance that writes nothing,
        one every 30 s, and fewer still among many.
        """
        before = len(self.messages("heartbeat"))
        self.bus.advance(60)
        self.assertEqual(self.heartbeats_since(before), {"w": 12, "r": 2})
        for number in range(49):
            ExtensionProcess(self.bus, f"r{number}")
        self.bus.advance(160)
        before, asked = (len(self.messages(kind)) for kind in ("heartbeat", "watch"))
        self.bus.advance(100)
        found = self.heartbeats_since(before)
        self.assertEqual(found, {"w": 1, "r": 1, **{f"r{n}": 1 for n in range(49)}})
        watched = Counter(each.to for each in self.messages("watch")[asked:])
        self.assertEqual(sum(watched.values()), 51 * 3 * 20)
        self.assertLessEqual(max(watched.values()) + len(found) - 1, 2 * 100)

    def test_heartbeats_of_many_are_spread(self) -> None:
        """Instances that started together do not send heartbeats together."""
        for number in range(40):
            ExtensionProcess(self.bus, f"r{number}")
        self.bus.advance(120)
        most = 0
        for _ in range(84):
            self.bus.seen.clear()
            self.bus.advance(1)
            most = max(most, len(self.messages("heartbeat")))
        self.assertLess(most, 6)

    def test_killed_among_many(self) -> None:
        """Watchers tell all that an instance was killed, as soon as among few."""
        self.start_many(20)
        for killed in (self.writer, self.bus.processes[-1]):
            epochs = self.reader.epochs
            self.assertIn(killed.name, epochs.living_watchers(self.now()))
            killed.kill()
            self.bus.advance(10)
            self.assertEqual(self.messages("silent"), [])
            self.bus.advance(5.5)
            for process in self.bus.processes:
                with self.subTest(killed.name, at=process.name):
                    heard = process.observer.silent
                    self.assertEqual(
                        {each.instance_name for each in heard}, {killed.name}
                    )
                    heard.clear()
            self.bus.seen.clear()

    def test_accused_wrongly(self) -> None:
        """An instance that is accused, and lives, contradicts at once."""
        self.start_many(20)
        self.bus.seen.clear()
        self.accuse("w", "w-epoch")
        self.assertEqual([m.sender for m in self.messages("heartbeat")], ["w"])
        self.assertTrue(self.reader.epochs.is_reporting("w", self.now() + 30))

    def test_accused_after_a_heartbeat(self) -> None:
        """An instance contradicts even if it has just sent a heartbeat."""
        self.start_many(20)
        self.accuse("w", "w-epoch")
        self.bus.advance(0.5)
        self.bus.seen.clear()
        self.accuse("w", "w-epoch")
        self.bus.advance(1)
        self.assertEqual([m.sender for m in self.messages("heartbeat")], ["w"])
        self.assertTrue(self.reader.epochs.is_reporting("w", self.now() + 30))

    def test_invented_instances_fall_silent(self) -> None:
        """However many instances fall silent together, a few are reported at once."""
        self.start_many(20)
        for number in range(100):
            name = f"ghost{number}"
            self.inject(type="watch", instance=name, epoch="e", every=40, answers=False)
        self.bus.advance(14)
        self.bus.seen.clear()
        for checks in (1, 2):
            self.bus.advance(1.2)
            reports = Counter(each.sender for each in self.messages("silent"))
            self.assertGreater(len(reports), 0)
            self.assertLessEqual(max(reports.values()), 10 * checks)

    def test_accusation_of_an_earlier_epoch(self) -> None:
        """A late accusation of an earlier epoch does not end the watch of the next."""
        self.start_many(20)
        killed = self.bus.processes[5]
        killed.kill()
        self.accuse(killed.name, "earlier")
        self.bus.advance(20)
        self.assertFalse(self.reader.epochs.is_reporting(killed.name, self.now()))

    def test_nothing_is_watched_after_a_stop(self) -> None:
        """An instance that has said goodbye starts no timer any more."""
        self.start_many(20)
        assert self.writer.extension is not None
        self.writer.extension.stop()
        before = list(self.writer.host.reactor.getDelayedCalls())
        self.inject(
            type="watch", instance="r0", epoch="r0-epoch", every=40, answers=False
        )
        self.assertEqual(self.writer.host.reactor.getDelayedCalls(), before)

    def test_invented_interval(self) -> None:
        """
        An invented epoch is forgotten within seconds, whatever interval was stated with
        it, even by peers that hear the real instance rarely.
        """
        self.start_many(20)
        for _ in range(2):
            self.inject(epoch="false", every=3600, answers=True)
            self.bus.advance(1.5)
        peers = [each for each in self.bus.processes if each is not self.writer]
        for expected, wait in (("false", 0), ("w-epoch", 15)):
            self.bus.advance(wait)
            found = {process.epochs.epoch_of("w") for process in peers}
            self.assertEqual(found, {expected})
        # A minute later, its heartbeats are rare again.
        self.bus.advance(60)
        self.bus.seen.clear()
        self.bus.advance(30)
        self.assertLessEqual(self.heartbeats_since(0)["w"], 1)

    def test_deaf_watcher(self) -> None:
        """An instance that hears nothing accuses nobody."""
        self.start_many(20)
        self.bus.seen.clear()
        lost: list[Published] = []

        def lose(message: Published) -> bool:
            lost.append(message)
            return message.is_extension

        self.bus.drop = lose
        self.bus.advance(60)
        kinds = {json.loads(m.payload)["type"] for m in lost}
        self.assertEqual(kinds, {"watch", "heartbeat"})
        self.bus.drop = lambda message: False
        self.bus.advance(60)
        self.assertEqual(self.messages("silent"), [])

    def test_older_peer_among_many(self) -> None:
        """Beside a peer that cannot watch, writers send heartbeats every 5 s."""
        self.start_many(20)
        self.inject(type="hello", instance="old", epoch="old-epoch", every=30)
        self.bus.advance(10)
        before = len(self.messages("heartbeat"))
        self.bus.advance(20)
        self.assertEqual(self.heartbeats_since(before)["w"], 4)

    def test_request_beside_a_hello(self) -> None:
        """A stock peer's REPLICATE is answered, even beside a hello."""
        hello = {"type": "hello", "instance": "new", "epoch": "e", "every": 30}
        hello |= {"answers": False, "reply": True, "replicates": True}
        for requests in (2, 0):
            self.inject(**hello)
            self.bus.seen.clear()
            for _ in range(requests):
                self.bus.publish(Published("stock", False, b"REPLICATE"))
            self.bus.advance(0.25 if requests else 1.5)
            self.assertEqual(self.positions_of("w"), 2)
            self.bus.advance(2)

    def test_hello_that_was_dropped(self) -> None:
        """The hello that replaces a dropped one announces the retained REPLICATE."""
        for is_dropped in (True, False):
            with self.subTest(is_dropped=is_dropped):
                late = ExtensionProcess(self.bus, f"late-{is_dropped}")
                if is_dropped:
                    self.bus.drop = lambda message: True
                self.bus.deliver()
                self.bus.drop = lambda message: False
                for is_announced in (is_dropped, False):
                    assert late.extension is not None
                    late.extension.sending_resumed()
                    self.bus.deliver()
                    hello = json.loads(self.messages("hello")[-1].payload)
                    self.assertEqual("replicates" in hello, is_announced)

    def positions_of(self, name: str) -> int:
        lines = [m.payload for m in self.bus.seen if m.sender == name]
        return sum(line.startswith(b"POSITION") for line in lines)

    def accuse(self, name: str, epoch: str) -> None:
        """Let the last instance report that another one is silent."""
        accuser = self.bus.processes[-1].name
        self.inject(
            type="silent",
            instance=accuser,
            epoch=f"{accuser}-epoch",
            every=40,
            answers=False,
            silent=[name, epoch, 15],
        )

    def start_many(self, count: int) -> None:
        """Start instances, and wait until each is watched."""
        for number in range(count):
            ExtensionProcess(self.bus, f"r{number}")
        self.bus.advance(120)

    def now(self) -> float:
        return self.reader.host.clock.seconds()

    def heartbeats_since(self, number: int) -> Counter[str]:
        """Return the number of heartbeats after the first ``number``, by instance."""
        return Counter(
            json.loads(each.payload)["instance"]
            for each in self.messages("heartbeat")[number:]
        )

    def test_older_peer(self) -> None:
        """With a peer that states no interval, all send heartbeats every 5 s."""
        self.inject(type="hello", instance="old", epoch="old-epoch")
        self.bus.advance(2)
        answered = Counter(each.to for each in self.messages("heartbeat"))
        before = len(self.messages("heartbeat"))
        for _ in range(4):
            self.bus.advance(5)
            self.inject(instance="old", epoch="old-epoch")
        self.assertEqual(self.heartbeats_since(before), {"w": 4, "r": 4, "old": 4})
        self.assertEqual(answered[""], 2)
        self.inject(type="goodbye", instance="old", epoch="old-epoch")
        self.bus.advance(10)
        before = len(self.messages("heartbeat"))
        self.bus.advance(60)
        self.assertEqual(self.heartbeats_since(before), {"w": 12, "r": 2})

    def test_start_among_many(self) -> None:
        """Only writers answer a hello, and only to the instance that sent it."""
        for number in range(20):
            ExtensionProcess(self.bus, f"r{number}")
        # A moment at which nobody asks its watchers.
        self.bus.advance(32)
        before = len(self.bus.seen)
        new = ExtensionProcess(self.bus, "new")
        self.bus.advance(1)
        sent = [m for m in self.bus.seen[before:] if m.is_extension]
        self.assertEqual([(m.sender, m.to) for m in sent], [("new", ""), ("w", "new")])
        self.assertEqual(new.observer.heartbeats[-1].instance_name, "w")

    def test_many_start(self) -> None:
        """
        One heartbeat answers many instances at once. Only a writer of a stream held in
        memory answers each new instance, without delay. No POSITION is needed.
        """
        ExtensionProcess(self.bus, "events", writes=["events"])
        self.bus.advance(30)
        before = len(self.bus.seen)
        for number in range(20):
            ExtensionProcess(self.bus, f"r{number}")
        self.bus.advance(2)
        seen = self.bus.seen[before:]
        sent = Counter((m.sender, m.to) for m in seen if m.is_extension)
        self.assertEqual(sent["events", "r0"], 1)
        self.assertEqual(sent["events", "r1"], 0)
        self.assertEqual(sent["events", ""], 1)
        self.assertEqual({sent["w", f"r{number}"] for number in range(20)}, {1})
        positions = Counter(m.sender for m in seen if not m.is_extension)
        self.assertEqual(positions.keys() & {"events", "w"}, set())

    def test_some_ask_among_many(self) -> None:
        """If fewer than half of the peers ask together, each is answered alone."""
        ExtensionProcess(self.bus, "events", writes=["events"])
        for number in range(20):
            ExtensionProcess(self.bus, f"r{number}")
        self.bus.advance(30)
        before = len(self.messages("heartbeat"))
        for number in range(8):
            ExtensionProcess(self.bus, f"s{number}")
        self.bus.advance(0.5)
        answers = self.messages("heartbeat")[before:]
        sent = Counter(m.to for m in answers if m.sender == "events")
        self.assertEqual(sent, {f"s{number}": 1 for number in range(8)})

    def test_idle_writers_send_at_the_same_time(self) -> None:
        """The heartbeats of idle writers coincide, whenever the writers started."""
        self.bus.advance(2.25)
        events = ExtensionProcess(self.bus, "events", writes=["events"])
        # Processes of one host have the same time.
        events.host.reactor.rightNow = self.writer.host.reactor.seconds()
        self.bus.advance(30)
        sent: dict[str, list[int]] = {"w": [], "events": []}
        for number in range(40):
            before = len(self.bus.seen)
            self.bus.advance(0.25)
            for message in self.bus.seen[before:]:
                if message.is_extension and message.sender in sent:
                    sent[message.sender].append(number)
        self.assertEqual(len(sent["w"]), 2)
        self.assertEqual(sent["w"], sent["events"])

    def test_answers_are_bounded(self) -> None:
        """Not every repeated hello of a peer is answered."""
        self.bus.advance(10)
        before = len(self.messages("heartbeat"))
        for _ in range(5):
            self.inject(type="hello", instance="r", epoch="r-epoch")
        self.assertLessEqual(len(self.messages("heartbeat")) - before, 2)

    def test_immediate_answer_replaces_a_late_one(self) -> None:
        """
        An immediate answer to a new peer replaces the delayed one that was scheduled.
        """
        self.bus.advance(10)
        self.inject(type="hello", instance="x", epoch="x-epoch")
        before = self.answers()
        self.inject(type="hello", instance="x", epoch="x-epoch")
        self.assertEqual(self.answers() - before, 0)
        self.inject(type="hello", instance="y", epoch="y-epoch")
        self.assertEqual(self.answers() - before, 1)
        self.bus.advance(0.5)
        self.assertEqual(self.answers() - before, 1)

    def test_frequent_restarts_are_answered(self) -> None:
        """
        The hello of a peer that restarts so often that it looks like several processes
        is answered without delay, too: the peer must know the writer's epoch before a
        position of a stream held in memory arrives.
        """
        for number in range(3 * MAX_CHANGES):
            self.bus.advance(EPOCH_CHANGE_INTERVAL / 2)
            before = self.answers()
            self.inject(type="hello", instance="x", epoch=f"epoch-{number}")
            self.assertEqual(self.answers() - before, 1, number)
        self.assertTrue(self.writer.observer.duplicates)

    def answers(self) -> int:
        """Return how many heartbeats the writer has sent."""
        return sum(
            json.loads(message.payload)["instance"] == "w"
            for message in self.messages("heartbeat")
        )

    def test_only_direct_links_are_narrowed(self) -> None:
        """
        A hello limits the streams that are sent on direct links, but not over Redis.
        """
        assert self.writer.connection is not None
        for is_direct in (False, True):
            self.writer.connection.is_direct = is_direct
            self.inject(type="hello", instance="x", epoch="x-epoch", streams=["typing"])
            sends = self.writer.handler.sender.sends(self.writer.connection, "events")
            self.assertEqual(sends, not is_direct)
        for message in self.messages("hello"):
            if message.sender != "w":
                self.assertNotIn("streams", json.loads(message.payload))

    def test_peer_of_direct_link(self) -> None:
        """The first message on a direct link names the peer."""
        connection = self.writer.connection
        assert connection is not None
        for is_direct in (False, True, True):
            connection.is_direct = is_direct
            self.inject(type="hello", instance="x", epoch="x-epoch")
        self.assertEqual(self.writer.observer.named, [(connection.name, "x")])

    def test_memory_streams_are_not_retained(self) -> None:
        """
        Rows of a stream held in memory are not retained a second time in the backlog.
        """
        self.writer.write(1, "a", stream="typing")
        self.writer.skip(3, "typing")
        self.writer.write(1, "a")
        self.bus.deliver()
        self.assertEqual([name for name, _ in self.writer.backlog], ["events"])


class EpochTests(ExtensionTests):
    def restart_writer(self, epoch: str = "w-epoch-2") -> ExtensionProcess:
        self.writer.leave()
        self.writer = ExtensionProcess(
            self.bus, "w", epoch=epoch, writes=["events", "typing"]
        )
        return self.writer

    def test_new_epoch_refetches_memory_stream(self) -> None:
        """
        After a restart, all rows of a stream held in memory are fetched again, even if
        the new token is above the old one.
        """
        self.writer.write(2, "old", stream="typing")
        self.bus.deliver()
        self.writer.leave()
        self.reader.typing.forget("w")
        # While the reader receives nothing, the writer passes the reader's old token.
        self.writer = ExtensionProcess(self.bus, "w", epoch="b", writes=["typing"])
        self.bus._waiting.clear()
        for token in (1, 2, 3):
            self.writer.write(token, f"new {token}", stream="typing")
        self.bus._waiting.clear()
        self.bus.advance(5.25)
        new = [("w", n, [f"new {n}"]) for n in (1, 2, 3)]
        self.assertEqual(self.reader.texts("typing"), [("w", 2, ["old"]), *new])
        self.assertEqual(self.reader.observer.resyncs["typing", "w", Resync.FULL], 1)
        self.assertEqual(self.reader.observer.restarted, ["w"])
        # The rows came from the stream's memory, not from the writer's backlog.
        self.assertEqual(self.writer.backlog_requests, [])

    def test_late_message(self) -> None:
        """A delayed message of a stale epoch is ignored."""
        self.write(1)
        self.restart_writer()
        self.bus.deliver()
        self.inject(positions={"events": [99, 0]})
        self.assertEqual(self.reader.events.requests, [])
        self.assertEqual(self.reader.observer.duplicates, [])

    def test_new_epoch_resumes_stored_stream(self) -> None:
        """
        A stream in the database continues from its token when its writer restarts.
        """
        self.write(1)
        self.restart_writer()
        self.writer.events.local_token = 1
        self.bus.deliver()
        self.write(2)
        self.assertEqual(self.reader.texts(), [row(1), row(2)])
        self.assertEqual(self.reader.events.requests, [])
        self.assertEqual(self.reader.observer.resets, [])

    def test_first_position_of_new_epoch_is_no_gap(self) -> None:
        """
        If a new epoch's first position is ahead, the rows between are fetched, but no
        gap is reported; within the same epoch, a gap is reported.
        """
        self.write(1)
        for is_new_epoch, gaps in ((True, []), (False, [("events", "w", 5, 9)])):
            token = 5 if is_new_epoch else 9
            assert self.reader.connection is not None
            self.reader.handler.writer_reported(
                self.reader.connection,
                "w",
                {"events": token},
                is_new_epoch=is_new_epoch,
            )
            self.assertEqual(self.reader.events.requests[-1][-1], token)
            self.assertEqual(self.reader.events.current_token("w"), token)
            self.assertEqual(self.reader.observer.gaps, gaps)

    def test_duplicate_of_own_name(self) -> None:
        """Each of two processes with the same name reports the duplicate."""
        second = ExtensionProcess(self.bus, "w", epoch="other", writes=["events"])
        self.bus.deliver()
        self.assertEqual(
            self.writer.observer.duplicates[0], ("w", "host-of-w:1 and host-of-w:1")
        )
        self.bus.advance(5.25)
        self.assertEqual(second.observer.duplicates[0][0], "w")

    def test_readers_report_duplicate_name(self) -> None:
        """A reader reports within seconds that two epochs send under one name."""
        ExtensionProcess(self.bus, "w", epoch="other", writes=["events"])
        self.bus.deliver()
        self.assertEqual(self.reader.observer.duplicates, [])
        self.bus.advance(6)
        self.assertEqual({name for name, _ in self.reader.observer.duplicates}, {"w"})

    def test_restart_is_no_duplicate(self) -> None:
        """An instance that restarts, with or without a goodbye, is not a duplicate."""
        self.bus.advance(6)
        self.restart_writer()
        self.bus.advance(12)
        assert self.writer.extension is not None
        self.writer.extension.stop()
        self.bus.deliver()
        self.restart_writer("w-epoch-3")
        self.bus.advance(12)
        for process in (self.reader, self.writer):
            self.assertEqual(process.observer.duplicates, [])
        self.assertEqual(self.reader.observer.restarted, ["w", "w"])

    def test_reconnecting_is_no_restart(self) -> None:
        """
        An instance that reconnects counts neither as restarted nor as a duplicate.
        """
        self.write(1)
        self.writer.leave()
        self.writer.join()
        self.bus.advance(6)
        self.assertEqual(self.reader.observer.restarted, [])
        self.assertEqual(self.reader.observer.duplicates, [])

    def test_rows_of_unknown_epoch_are_ignored(self) -> None:
        """
        A message ahead of rows is ignored unless it is of the writer's current epoch.
        """
        self.inject(type="rows", epoch="strange", positions={"events": [99, 0]})
        self.assertEqual(self.reader.events.requests, [])
        self.assertEqual(self.reader.observer.restarted, [])
