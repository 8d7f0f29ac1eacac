"""Tests for :mod:`synapse_replication.pipeline.spark.class_archive`."""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import sys
from collections import namedtuple
from pathlib import Path

import attrs
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.pipeline.spark import class_archive
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
        return ClassArchive.of(self.java, "", str(self.jar))

    def make(self, content: str = "good") -> bool:
        """Do as the maker does: write a new archive, and adopt it."""
        archive = self.archive()
        assert archive.folder is not None
        new = archive.folder / ".new-a.jsa"
        new.write_text(content)
        return archive.adopt(new)

    def patch_maker(self, script: str) -> Path:
        """Let a script be the maker; return the file to which it appends arguments.

        :param script: its commands, before which it appends its last three arguments
            and Spark's.
        """
        called, program = self.folder / "called", self.folder / "maker"
        program.write_text(
            "#!/bin/sh\n"
            f'echo "$3|$4|$5|$PYSPARK_SUBMIT_ARGS|$JAVA_TOOL_OPTIONS" >> {called}\n'
            f"{script}\n"
        )
        program.chmod(0o755)
        self.patch(sys, "executable", str(program))
        return called

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

    def test_maker(self) -> None:
        """
        The maker gets the paths, and settings with which Java writes the archive and
        which are not those of the user's jobs.
        """
        called = self.patch_maker("exit 0")
        os.environ.update(
            JAVA_TOOL_OPTIONS="-agentlib:x", PYSPARK_SUBMIT_ARGS="--conf a=b"
        )
        archive = ClassArchive.of(self.java, "/extra.jar", str(self.jar))
        os.mkfifo(called)
        archive.start_maker()
        new, extra, of_spark, arguments, options = called.read_text()[:-1].split("|")
        self.assertEqual((extra, of_spark), ("/extra.jar", str(self.jar)))
        self.assertEqual(Path(new).parent, archive.folder)
        submit = shlex.split(arguments)
        self.assertEqual(
            submit[2:], ["--driver-class-path", "/extra.jar", "pyspark-shell"]
        )
        name, _, value = submit[1].partition("=")
        self.assertEqual(name, "spark.driver.defaultJavaOptions")
        self.assertEqual(shlex.split(value)[0], f"-XX:ArchiveClassesAtExit={new}")
        self.assertEqual(options, "")

    def test_maker_ended_early(self) -> None:
        """If the first attempt was in vain, the second is waited for, and the last."""
        called = self.patch_maker("")
        for attempts in (b".", b"."):
            folder = self.archive().folder
            assert folder is not None
            (folder / f"{self.archive().key}.attempts").write_bytes(attempts)
            called.unlink(missing_ok=True)
            self.archive().start_maker()
            self.assertEqual(len(called.read_text().splitlines()), 1)
        self.archive().start_maker()
        self.assertEqual(len(called.read_text().splitlines()), 1)

    def test_slow_maker(self) -> None:
        """A job does not wait for ever."""
        self.patch(class_archive, "_PATIENCE", 0.01)
        release = self.folder / "release"
        os.mkfifo(release)
        called = self.patch_maker(f"read line < {release}")
        folder = self.archive().folder
        assert folder is not None
        attempts = folder / f"{self.archive().key}.attempts"
        attempts.write_bytes(b".")
        self.archive().start_maker()
        release.write_text("end\n")
        with attempts.open() as lock:
            # The maker holds the lock until its end.
            fcntl.flock(lock, fcntl.LOCK_SH)
        self.assertEqual(len(called.read_text().splitlines()), 1)

    def test_maker_is_running(self) -> None:
        """While a maker is running, no other one is started."""
        called = self.patch_maker("")
        folder = self.archive().folder
        assert folder is not None
        with (folder / f"{self.archive().key}.attempts").open("ab") as attempts:
            fcntl.flock(attempts, fcntl.LOCK_EX)
            self.archive().start_maker()
        self.assertFalse(called.exists())

    def assert_no_maker(self) -> None:
        """Check that no maker is started."""
        called = self.patch_maker("")
        folder = self.archive().folder
        if folder is not None:
            # A maker would be waited for.
            (folder / f"{self.archive().key}.attempts").write_bytes(b".")
        self.archive().start_maker()
        self.assertFalse(called.exists())

    def test_java_without_archive(self) -> None:
        """A Java without an archive of its own classes would write none at its end."""
        self.of_java.unlink()
        self.assert_no_maker()

    def test_folder_of_files(self) -> None:
        """Java archives nothing if the class path has a folder that is not empty."""
        self.jar.unlink()
        self.jar.mkdir()
        (self.jar / "spark-defaults.conf").touch()
        self.assert_no_maker()

    def test_made_meanwhile(self) -> None:
        """No archive is made if there is one now."""
        self.make()
        self.assert_no_maker()

    def test_unusable(self) -> None:
        """An archive that Java rejects is removed."""
        self.assertFalse(self.make("bad"))
        self.assertIsNone(self.archive().find())
        self.assertEqual(self.files(), [])

    def test_not_written(self) -> None:
        """If Java wrote no archive, there is none."""
        archive = self.archive()
        assert archive.folder is not None
        self.assertFalse(archive.adopt(archive.folder / ".new-a.jsa"))
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
            self.assertIsNone(ClassArchive.of(other, "", jar).find())
        more = os.pathsep.join([jar, str(self.folder)])
        self.assertIsNone(ClassArchive.of(java, "", more).find())
        self.jar.write_text("other classes")
        self.assertIsNone(self.archive().find())

    def test_little_space(self) -> None:
        """No archive is made if the disk is nearly full."""
        usage = namedtuple("usage", "total used free")
        self.patch(shutil, "disk_usage", lambda path: usage(2**40, 2**40, 2**29))
        self.assert_no_maker()

    def test_no_folder(self) -> None:
        """Without a folder that can be written, no archive is found or made."""
        self.cache.write_text("a file")
        self.assertIsNone(self.archive().find())
        self.assert_no_maker()

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
        self.assert_no_maker()

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

    def test_many(self) -> None:
        """Of many archives, those that were used last are retained."""
        names = []
        for number in range(9):
            self.jar.write_text("classes" * (number + 1))
            self.make()
            found = self.archive().find()
            assert found is not None
            names.append(found.name)
            os.utime(found, (found.stat().st_mtime - 1_000 + number,) * 2)
        self.assertEqual({path.name for path in self.files()}, set(names[-6:]))

    def test_left_behind(self) -> None:
        """What a maker left behind that was ended is removed after an hour."""
        folder = self.archive().folder
        assert folder is not None
        for name, age in (("a", 3_700), ("b", 60)):
            left = folder / f".new-{name}.jsa"
            left.touch()
            os.utime(left, (left.stat().st_mtime - age,) * 2)
        self.jar.write_text("more classes")
        new = folder / ".new-c.jsa"
        new.write_text("good")
        self.assertTrue(self.archive().adopt(new))
        names = {path.name for path in self.files()}
        self.assertEqual({name for name in names if ".new" in name}, {".new-b.jsa"})
