"""Tests of epochs that are saved with the tokens of streams held in memory."""

from __future__ import annotations

from synapse_replication.handlers.events import Resync
from tests.handlers.extended import ExtensionProcess
from tests.handlers.extension.extension_case import ExtensionTests, row


class SavedEpochTests(ExtensionTests):
    """A reader whose sink saves the tokens of ``typing`` and their epochs."""

    def put_in_memory(
        self, *tokens: int, reader: ExtensionProcess | None = None
    ) -> None:
        """Put rows into the writer's memory without sending them."""
        for process in (self.writer, reader or self.reader):
            process.typing.forget("w")
            for token in tokens:
                process.typing.persist("w", token, [f"row {token}"])
        self.writer.handler.sender.set_last_sent_token("typing", tokens[-1])
        assert self.writer.extension is not None
        self.writer.extension.position_sent("typing", 0, tokens[-1])

    def restart_reader(
        self, *tokens: int, epoch: str | None, token: int = 5
    ) -> ExtensionProcess:
        """Restart the reader, with ``token`` of ``epoch`` saved."""
        self.reader.leave()
        self.reader = ExtensionProcess(
            self.bus, "r", epoch="r-epoch-2", saved={"w": (epoch, token)}
        )
        self.put_in_memory(*tokens)
        return self.reader

    def test_another_epoch(self) -> None:
        """
        If the writer's epoch differs from the saved epoch, all rows of the writer are
        fetched, even if its token is above the saved token.
        """
        reader = self.restart_reader(1, 2, 9, epoch="earlier")
        self.bus.advance(6)
        self.assertEqual(reader.texts("typing"), [row(1), row(2), row(9)])
        # The position was rewound before the new epoch was saved.
        self.assertEqual(reader.host.rows.begun, [("typing", "w", "w-epoch", 0)])
        self.assertEqual(reader.observer.resyncs["typing", "w", Resync.FULL], 1)

    def test_same_epoch(self) -> None:
        """
        If the writer's epoch is the saved one, the reader resumes from the saved token.
        """
        reader = self.restart_reader(4, 5, 6, epoch="w-epoch")
        self.bus.advance(6)
        self.assertEqual(reader.texts("typing"), [row(6)])
        self.assertEqual(reader.observer.resets, [])
        self.assertEqual(reader.host.rows.begun, [])

    def test_unknown_epoch(self) -> None:
        """If a token was saved without its epoch, all rows are fetched."""
        reader = self.restart_reader(1, 9, epoch=None)
        self.bus.advance(6)
        self.assertEqual(reader.texts("typing"), [row(1), row(9)])
        # The epoch is saved, so nothing is fetched again.
        self.assertEqual(reader.host.rows.epochs, {("typing", "w"): "w-epoch"})
        self.bus.advance(20)
        self.assertEqual(len(reader.observer.resets), 1)

    def test_first_start(self) -> None:
        """A reader without a saved token saves the writer's epoch and fetches once."""
        self.put_in_memory(1, 2)
        reader = ExtensionProcess(self.bus, "new")
        self.put_in_memory(1, 2, reader=reader)
        self.bus.advance(6)
        self.assertEqual(reader.texts("typing"), [row(1), row(2)])
        self.assertEqual(reader.host.rows.begun, [("typing", "w", "w-epoch", 0)])
        self.assertEqual(reader.observer.resets, [])

    def test_many_start_at_once(self) -> None:
        """
        Each of several readers that start together receives the epoch before the
        position.
        """
        self.put_in_memory(1, 2)
        readers = [ExtensionProcess(self.bus, f"new{n}") for n in range(5)]
        for reader in readers:
            self.put_in_memory(1, 2, reader=reader)
        self.bus.advance(6)
        for reader in readers:
            self.assertEqual(reader.texts("typing"), [row(1), row(2)])
            self.assertEqual(reader.observer.resets, [])

    def test_rows_before_the_epoch(self) -> None:
        """
        Rows that arrived on an uninterrupted link before the epoch was known belong to
        it.
        """
        self.bus.drop = lambda message: message.is_extension
        reader = ExtensionProcess(self.bus, "new")
        self.put_in_memory(1, 2, reader=reader)
        self.bus.deliver()
        self.assertEqual(reader.texts("typing"), [row(1), row(2)])
        self.bus.drop = lambda message: False
        self.bus.advance(12)
        self.assertEqual(reader.texts("typing"), [row(1), row(2)])
        self.assertEqual(reader.observer.resets, [])
        self.assertEqual(reader.host.rows.epochs, {("typing", "w"): "w-epoch"})
        self.assertEqual(reader.typing.current_token("w"), 2)

    def test_rows_before_the_hello_of_a_direct_link(self) -> None:
        """Rows that a direct link carried before the hello belong to its epoch."""
        self.bus.drop = lambda message: message.is_extension
        reader = ExtensionProcess(self.bus, "new")
        assert reader.connection is not None
        reader.connection.is_direct = True
        self.put_in_memory(1, 2, reader=reader)
        self.bus.deliver()
        self.bus.drop = lambda message: False
        assert self.writer.extension is not None
        self.writer.extension.sending_resumed()
        self.bus.deliver()
        self.assertEqual(reader.texts("typing"), [row(1), row(2)])
        self.assertEqual(reader.observer.resets, [])
        self.assertEqual(reader.host.rows.epochs, {("typing", "w"): "w-epoch"})

    def test_batch_before_the_epoch(self) -> None:
        """A batch during which the epoch is first received is delivered completely."""
        reader = self.restart_reader(5, 6, epoch=None, token=6)
        self.bus.drop = lambda message: message.is_extension
        self.bus.deliver()
        self.writer.handler.sender.stream_update("typing", None, ["a"])
        self.bus.deliver()
        self.bus.drop = lambda message: False
        self.bus.advance(6)
        for process in (self.writer, reader):
            process.typing.persist("w", 7, ["a"], ["b"])
        self.writer.handler.sender.stream_update("typing", 7, ["b"])
        self.bus.advance(1)
        batch = ("w", 7, ["a", "b"])
        self.assertEqual(reader.texts("typing"), [row(5), row(6), batch])

    def test_link_is_lost_before_it_is_handled(self) -> None:
        """An epoch received just before a link is lost is handled on the next link."""
        self.put_in_memory(2)
        self.writer.handler.sender.send_position("typing", 2, 2)
        self.bus.advance(6)
        self.reader.events.persist("w", 1, ["row 1"])
        self.reader.host.rows.is_held = True
        self.writer.handler.sender.stream_update("typing", 3, ["row 3"])
        self.bus.deliver()
        self.writer.leave()
        self.writer = ExtensionProcess(self.bus, "w", epoch="b", writes=["typing"])
        self.put_in_memory(1, 7)
        self.bus.deliver()
        self.reader.leave()
        self.reader.host.rows.is_held = False
        self.reader.host.rows.release()
        self.reader.join()
        self.bus.advance(6)
        self.assertEqual(self.reader.texts("typing")[2:], [row(1), row(7)])

    def test_repeated_report_while_handling(self) -> None:
        """An epoch that is reported again while it is being handled is handled once."""
        reader = self.restart_reader(1, 9, epoch="earlier")
        rows = reader.host.rows
        rows.is_held = True
        self.bus.advance(12)
        rows.is_held = False
        while rows.holds:
            rows.release()
        self.bus.advance(6)
        self.assertEqual(reader.texts("typing"), [row(1), row(9)])
        self.assertEqual(reader.typing.requests, [("w", 0, 9)])

    def test_repeated_report_before_retry(self) -> None:
        """An epoch that is reported again does not shorten the wait after a failure."""
        reader = self.restart_reader(1, 9, epoch="earlier")
        # After the position of events: the epoch and one later call fail.
        reader.host.rows.failures = [None, *(RuntimeError("full") for _ in range(2))]
        self.bus.deliver()
        self.assertEqual(len(reader.host.rows.failures), 1)
        for token in (9, 10):
            self.inject(positions={"typing": [token, 0]})
        self.assertEqual(len(reader.host.rows.failures), 1)
        for process in (self.writer, reader):
            process.typing.persist("w", 10, ["row 10"])
        self.bus.advance(6)
        self.assertEqual(reader.texts("typing"), [row(1), row(9), row(10)])
        self.assertEqual(reader.typing.requests, [("w", 0, 10)])

    def test_goodbye_of_another_epoch(self) -> None:
        """A goodbye of a new epoch does not cause its rows to be fetched."""
        self.put_in_memory(9)
        self.reader.typing.advance("w", 5)
        for epoch in ("one", "two"):
            self.inject(type="goodbye", epoch=epoch, positions={"typing": [5, 0]})
        self.assertEqual(self.reader.typing.requests, [])
        self.assertEqual(self.reader.observer.resets, [])

    def test_sink_that_fails(self) -> None:
        """
        If the sink fails to save an epoch, the failure is reported, and the epoch is
        offered again, at token 0.
        """
        error = RuntimeError("full")
        reader = self.restart_reader(1, 9, epoch="earlier")
        # The sink accepts the positions of events and typing, but not the epoch.
        reader.host.rows.failures = [None, None, error]
        self.bus.advance(6)
        self.assertEqual(reader.host.rows.begun, [("typing", "w", "w-epoch", 0)])
        self.assertEqual(reader.texts("typing"), [row(1), row(9)])
        self.assertEqual(reader.host.rows.failures, [])
        # There is no position to rewind.
        new = ExtensionProcess(self.bus, "new")
        new.host.rows.failures = [None, error]
        self.bus.drop = lambda message: message.payload.startswith(b"POSITION")
        self.put_in_memory(1, 9, reader=new)
        self.bus.advance(0.5)
        self.assertEqual(len(new.observer.catch_up_failures), 1)
        self.bus.advance(6)
        self.assertEqual(new.host.rows.epochs, {("typing", "w"): "w-epoch"})
