"""Tests for the lines logged at the start of the host."""

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

    def test_tested_version(self) -> None:
        """One line names the drop-in's version, the host's version and the parts."""
        announcement.prepare(["handler", "ids"], "1.2.3", None)
        ((level, text),) = self._lines()
        self.assertEqual(level, "INFO")
        for word in (__version__, "handler, ids", "Synapse 1.2.3"):
            self.assertIn(word, text)

    def test_untested_version(self) -> None:
        """For an untested version, a warning is logged."""
        announcement.prepare(["ids"], "9.9", "matrix-synapse 9.9 was not tried")
        (_, (level, text)) = self._lines()
        self.assertEqual(level, "WARNING")
        self.assertIn("9.9 was not tried", text)

    def test_once(self) -> None:
        """The lines are logged once, however many homeserver objects exist."""
        announcement.prepare(["ids"], "1.2.3", None)
        self._lines()
        with self.assertNoLogs("synapse_replication"):
            announcement.write()
