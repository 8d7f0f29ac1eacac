"""Tests for a database role that lacks the rights that a process needs."""

from __future__ import annotations

import contextlib

import psycopg2

from tests.integration.deployment import PATIENCE, DeploymentTestCase


class DatabaseRoleTests(DeploymentTestCase):
    """Tests for a role without any rights."""

    def test_without_rights(self) -> None:
        """The process logs one message that names the key, without a traceback."""
        role = f"powerless_{self.folder.name.partition('-')[2]}"
        with contextlib.closing(psycopg2.connect(self.dsn)) as connection:
            connection.cursor().execute(f'CREATE ROLE "{role}"')
            connection.commit()
        self.shared["database"]["args"]["options"] = f"-c role={role}"
        process = self.start("main", self.main)
        self.assertEqual(process.wait(PATIENCE), 1)
        log = self.log_of("main")
        self.assertIn("database: PostgreSQL refuses access: permission denied", log)
        self.assertIn("GRANT", log)
        self.assertNotIn("Traceback", log)
