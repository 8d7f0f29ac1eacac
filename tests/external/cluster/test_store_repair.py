"""Repairs archives on S3, by the tests of those in a folder, which take longer here."""

from __future__ import annotations

from tests.external import skip_reason
from tests.pipeline.archive import test_repair
from tests.support.object_store import use_server

skip = skip_reason("cluster")


class StoreRepairTests(test_repair.RepairTests):
    """Tests with an archive on a private S3 server."""

    def location(self) -> str:
        """Return the location of the archive."""
        use_server(self)
        return "s3://bucket/archive"
