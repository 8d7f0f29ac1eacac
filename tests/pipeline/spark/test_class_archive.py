"""Tests for :mod:`synapse_replication.pipeline.spark.class_archive`."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.spark.class_archive import ClassArchive
from synapse_replication.pipeline.spark.java import Java

_DAY = 86_400


class ClassArchiveTests(SynchronousTestCase):
    """Tests for when an archive is used, made and rejected, with a fake Java."""

    def setUp(self) -> None:
        self.folder = Path(self.mktemp()).absolute()
        self.folder.mkdir()
        self.cache = self.folder / "cache"
        environ = {**os.environ, "XDG_CACHE_HOME": str(self.cache)}
        self.patch(os, "environ", environ)
        self.jar = self.folder / "a.jar"
        self.jar.write_text("classes")
        program = self.folder / "jdk" / "bin" / "java"
        program.parent.mkdir(parents=True)
        # It accepts an archive with the content "good".
        program.write_text(
            "#!/bin/sh\n"
            'test "$2" = -Xshare:on && grep -q good "${1#-XX:SharedArchiveFile=}"\n'
        )
        program.chmod(0o755)
        self.of_java = self.folder / "jdk" / "lib" / "server" / "classes.jsa"
        self.of_java.parent.mkdir(parents=True)
        self.of_java.touch()
        self.java = Java(str(program), 17, "17.0.1+1")

    def archive(self) -> ClassArchive:
        """Return the archive for the jar."""
        return ClassArchive.of(self.java, str(self.jar))

    def make(self, content: str = "good") -> bool:
        """Do as a first run does: write a new archive, and adopt it."""
        archive = self.archive()
        new = archive.new_file()
        assert new is not None
        new.write_text(content)
        return archive.adopt(new)

    def files(self) -> list[Path]:
        """Return all files in the cache folder."""
        return [path for path in self.cache.rglob("*") if path.is_file()]

    def test_made_once(self) -> None:
        """The first run finds no archive, and makes the one that later runs find."""
        self.assertIsNone(self.archive().find())
        self.assertTrue(self.make())
        found = self.archive().find()
        self.assertEqual([found], self.files())
        assert found is not None
        self.assertEqual(found.read_text(), "good")

    def test_java_without_archive(self) -> None:
        """A Java without an archive of its own classes would write none at its end."""
        self.of_java.unlink()
        self.assertIsNone(self.archive().new_file())

    def test_unusable(self) -> None:
        """An archive that Java rejects is removed."""
        self.assertFalse(self.make("bad"))
        self.assertIsNone(self.archive().find())
        self.assertEqual(self.files(), [])

    def test_not_written(self) -> None:
        """If Java wrote no archive, there is none."""
        archive = self.archive()
        new = archive.new_file()
        assert new is not None
        self.assertFalse(archive.adopt(new))
        self.assertEqual(self.files(), [])

    def test_incomplete(self) -> None:
        """An archive that was truncated later is not used, and made again."""
        self.make()
        self.files()[0].write_text("goo")
        self.assertIsNone(self.archive().find())
        self.assertTrue(self.make())
        self.assertIsNotNone(self.archive().find())

    def test_stale(self) -> None:
        """An archive is for one build of Java, one class path, and these jars."""
        self.make()
        java, jar = self.java, str(self.jar)
        for other in (
            attrs.evolve(java, build="17.0.2+8"),
            attrs.evolve(java, path=java.path + "x"),
        ):
            self.assertIsNone(ClassArchive.of(other, jar).find())
        more = os.pathsep.join([jar, str(self.folder)])
        self.assertIsNone(ClassArchive.of(java, more).find())
        self.jar.write_text("other classes")
        self.assertIsNone(self.archive().find())

    def test_two_jobs(self) -> None:
        """Two jobs that make the archive at the same time write two files."""
        first, second = self.archive(), self.archive()
        files = [first.new_file(), second.new_file()]
        self.assertEqual(len(set(files)), 2)
        for archive, new in zip((first, second), files, strict=True):
            assert new is not None
            new.write_text("good")
            self.assertTrue(archive.adopt(new))
        self.assertEqual(len(self.files()), 1)

    def test_little_space(self) -> None:
        """No archive is made if the disk is nearly full."""
        usage = namedtuple("usage", "total used free")
        self.patch(shutil, "disk_usage", lambda path: usage(2**40, 2**40, 2**29))
        self.assertIsNone(self.archive().new_file())

    def test_no_folder(self) -> None:
        """Without a folder that can be written, no archive is found or made."""
        self.cache.write_text("a file")
        self.assertIsNone(self.archive().find())
        self.assertIsNone(self.archive().new_file())

    def test_no_home(self) -> None:
        """A user without a home, and without an entry in passwd, has no archive."""

        def home() -> Path:
            raise RuntimeError("Could not determine home directory.")

        self.patch(os, "environ", {})
        self.patch(Path, "home", home)
        self.assertIsNone(self.archive().folder)

    def test_folder_of_others(self) -> None:
        """Nothing is read from a folder that other users may write to."""
        self.make()
        (self.cache / "synapse-replication").chmod(0o777)
        self.assertIsNone(self.archive().find())
        self.assertIsNone(self.archive().new_file())

    def test_old_ones(self) -> None:
        """An archive that no job has used for a month is removed."""
        self.make()
        (old,) = self.files()
        newest = old.stat().st_mtime
        self.jar.write_text("other classes")
        self.make()
        self.assertIn(old, self.files())
        os.utime(old, (newest - 31 * _DAY, newest - 31 * _DAY))
        self.make()
        self.assertNotIn(old, self.files())
        self.assertEqual(len(self.files()), 1)
