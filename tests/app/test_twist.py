"""Tests for synapse_replication.app.twist."""

from __future__ import annotations

import configparser
from pathlib import Path

from twisted.application.service import IServiceMaker
from twisted.plugin import getPlugins
from twisted.python.usage import UsageError

from synapse_replication.app.services import ProcessService
from synapse_replication.app.twist import Options, makeService
from tests.app.test_config import HOMESERVER, WORKER
from tests.app.test_config_files import FilesMixin


class TwistTests(FilesMixin):
    def test_plugin(self) -> None:
        """twist finds the plugin by its name."""
        (maker,) = (
            plugin
            for plugin in getPlugins(IServiceMaker)
            if plugin.tapname == "synapse-replication"
        )
        self.assertIs(maker.options, Options)
        self.assertIs(maker.makeService, makeService)

    def test_plugin_is_installed(self) -> None:
        """The plugin is part of what is built, though its folder is no package."""
        root = Path(__file__).parent.parent.parent
        settings = configparser.ConfigParser(interpolation=None)
        settings.read(root / "setup.cfg")
        self.assertEqual(
            settings["options"]["py_modules"].split(),
            [
                f"twisted.plugins.{file.stem}"
                for file in root.glob("twisted/plugins/*.py")
            ],
        )

    def test_service(self) -> None:
        """The files that -c names make the service of their process."""
        options = Options()
        options.parseOptions(
            ["-c", self.write("h.yaml", HOMESERVER), "-c", self.write("w.yaml", WORKER)]
        )
        service = makeService(options)
        assert isinstance(service, ProcessService)
        self.assertEqual(service.host.identity.instance_name, "writer1")

    def test_mistakes(self) -> None:
        """Mistakes in the configuration are mistakes in the command."""
        with self.assertRaises(UsageError) as caught:
            Options().parseOptions(["-c", self.write("h.yaml", "redis: 7\n")])
        self.assertIn("server_name: is missing", str(caught.exception))
        with self.assertRaises(UsageError) as caught:
            Options().parseOptions([])
        self.assertIn("-c FILE", str(caught.exception))
