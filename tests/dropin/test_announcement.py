"""Tests for what is written to the host's log at the start."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication import __version__
from synapse_replication.dropin import announcement


class AnnouncementTests(SynchronousTestCase):
    """Tests for prepare and write."""

    def _lines(self) -> list[tuple[str, str]]:
        with self.assertLogs("synapse_replication") as logs:
            announcement.write()
        return [(record.levelname, record.getMessage()) for record in logs.records]

    def test_tried_version(self) -> None:
        """
        One line says whose replication it is, which version, and which parts.
        """
        announcement.prepare(["handler", "ids"], "1.2.3", None)
        ((level, text),) = self._lines()
        self.assertEqual(level, "INFO")
        for word in (__version__, "handler, ids", "Synapse 1.2.3"):
            self.assertIn(word, text)

    def test_untried_version(self) -> None:
        """
        A version that was not tried is a warning.
        """
        announcement.prepare(["ids"], "9.9", "matrix-synapse 9.9 was not tried")
        (_, (level, text)) = self._lines()
        self.assertEqual(level, "WARNING")
        self.assertIn("9.9 was not tried", text)

    def test_once(self) -> None:
        """
        The lines are written once, however many homeserver objects there are.
        """
        announcement.prepare(["ids"], "1.2.3", None)
        self._lines()
        with self.assertNoLogs("synapse_replication"):
            announcement.write()
