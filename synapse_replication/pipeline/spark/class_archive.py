"""The archive of Java's classes in the user's cache folder, which halves Spark's start.

A Java process with ``-XX:SharedArchiveFile`` maps the classes that an earlier process
has loaded and verified (*class data sharing*), instead of reading them from the jars.
The first job starts a process at its end that makes the archive in the background
(:mod:`~synapse_replication.pipeline.spark.archive_maker`), and later ones use it. It
takes 100 to 200 MB, and is bound to a Java and to the jars: a hash of both is in its
name.

Such an archive extends the one of Java's own classes, which is a part of most Javas,
but not of the wheel's: for that one, none is made.

Nothing depends on it. Java itself ignores an archive that does not match, and none is
made if the folder cannot be written, belongs to another user, or has little space. Java
checks a new archive completely, and it gets its name, which includes its size, only
then: an incomplete one is not used.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import attrs

from synapse_replication.pipeline.spark.java import Java

#: The free space in bytes below which no archive is made.
_ENOUGH_SPACE: Final = 2**30

#: The age in s at which an archive that no job has used is removed, and the number of
#: archives beyond which those that were used least recently are: a machine that makes
#: a virtual environment for each of its tasks would otherwise fill its disk.
_RETAINED_SECONDS: Final = 30 * 86_400
_RETAINED_ARCHIVES: Final = 6

_SUFFIX: Final = ".jsa"

#: The beginning of the name of an archive that is being made, and the age in s at which
#: its maker has been ended.
_NEW: Final = ".new-"
_MAKING_SECONDS: Final = 3_600

#: The suffix of a file whose size is the number of attempts to make an archive.
_ATTEMPTS: Final = ".attempts"

#: The greatest number of attempts.
_MOST_ATTEMPTS: Final = 2

#: How long a job waits for an archive at its end, in s.
_PATIENCE: Final = 120.0

#: The module that makes an archive.
_MAKER: Final = "synapse_replication.pipeline.spark.archive_maker"

#: The variables that configure Java and Spark for jobs, but not for the maker.
_NOT_FOR_MAKER: Final = frozenset(
    {
        *("SPARK_SUBMIT_OPTS", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS"),
        *("_JAVA_OPTIONS", "SPARK_LOCAL_DIRS", "SPARK_DRIVER_MEMORY"),
    }
)

#: Silences Java's remarks about archives, which it would print to standard output.
#: Java 25 takes it for an error that the archive of its own classes was made without
#: the options that Spark requires.
_QUIET: Final = ("-Xlog:disable", "-Xlog:all=error:stderr", "-Xlog:cds*=off:stderr")


@attrs.frozen
class ClassArchive:
    """The archive for one Java and one class path.

    :ivar extra: the class path that the user configured; empty without one.
    :ivar of_spark: the class path of Spark, which comes after it.
    :ivar folder: the folder of all archives; ``None`` if no folder can be used.
    :ivar key: identifies Java and the jars.
    """

    java: Java
    extra: str
    of_spark: str
    folder: Path | None
    key: str

    @classmethod
    def of(cls, java: Java, extra: str, of_spark: str) -> ClassArchive:
        """Return the archive, which need not exist.

        The folder is ``synapse-replication`` in ``XDG_CACHE_HOME``, by default
        ``~/.cache``. Only the user may write to it, because Java trusts the classes.
        """
        digest = hashlib.sha256(f"{java.path}\n{java.build}\n".encode())
        for each in f"{extra}{os.pathsep}{of_spark}".split(os.pathsep):
            digest.update(each.encode())
            with contextlib.suppress(OSError):
                found = os.stat(each)
                digest.update(f" {found.st_size} {found.st_mtime_ns}\n".encode())
        key = f"java{java.version}-{digest.hexdigest()[:16]}"
        return cls(java, extra, of_spark, cache_folder(), key)

    @property
    def class_path(self) -> str:
        """The whole class path."""
        return os.pathsep.join(filter(None, (self.extra, self.of_spark)))

    def find(self) -> Path | None:
        """Return the archive's file; ``None`` if there is none, or it is incomplete."""
        if self.folder is None:
            return None
        for path in self.folder.glob(f"{self.key}-*{_SUFFIX}"):
            with contextlib.suppress(OSError):
                if path.name == self._name(path):
                    # Archives are removed in the order of their last use.
                    os.utime(path)
                    return path
        return None

    def _name(self, path: Path) -> str:
        return f"{self.key}-{path.stat().st_size}{_SUFFIX}"

    @staticmethod
    def options_to_use(path: Path) -> list[str]:
        """Return the options of a Java process that uses an archive."""
        return [f"-XX:SharedArchiveFile={path}", *_QUIET]

    def start_maker(self) -> None:
        """Start the process that makes the archive, unless it cannot succeed.

        The processes of a container or of a service are ended with the job. Therefore,
        if the first attempt was in vain, the second one is waited for, and is the last.
        """
        if self.folder is None:
            return
        path = self._attempts(self.folder)
        with contextlib.suppress(OSError), path.open("ab") as attempts:
            # The maker inherits the lock, and holds it until its end.
            fcntl.flock(attempts, fcntl.LOCK_EX | fcntl.LOCK_NB)
            number = os.fstat(attempts.fileno()).st_size
            if number >= _MOST_ATTEMPTS or not self._can_be_made(self.folder):
                return
            if self.find() is not None:
                # Another job's maker has just ended.
                return
            attempts.write(b".")
            attempts.flush()
            new = self.folder / f"{_NEW}{self.key}{_SUFFIX}"
            # Java does not overwrite a file.
            new.unlink(missing_ok=True)
            maker = subprocess.Popen(
                [sys.executable, "-m", _MAKER, str(new), self.extra, self.of_spark],
                env=self._environment_of_maker(new),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[attempts.fileno()],
            )
            if number > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    maker.wait(_PATIENCE)

    def _attempts(self, folder: Path) -> Path:
        return folder / f"{self.key}{_ATTEMPTS}"

    def _can_be_made(self, folder: Path) -> bool:
        paths = map(Path, self.class_path.split(os.pathsep))
        return (
            _has_own_archive(self.java)
            and shutil.disk_usage(folder).free >= _ENOUGH_SPACE
            # Java archives nothing if the class path has a folder of files.
            and not any(path.is_dir() and any(path.iterdir()) for path in paths)
        )

    def _environment_of_maker(self, new: Path) -> dict[str, str]:
        """Return variables with which a session writes an archive at its end."""
        options = shlex.join([f"-XX:ArchiveClassesAtExit={new}", *_QUIET])
        arguments = ["--conf", f"spark.driver.defaultJavaOptions={options}"]
        if self.extra:
            arguments += ["--driver-class-path", self.extra]
        return {
            **{k: v for k, v in os.environ.items() if k not in _NOT_FOR_MAKER},
            "PYSPARK_SUBMIT_ARGS": shlex.join([*arguments, "pyspark-shell"]),
        }

    def adopt(self, path: Path) -> bool:
        """Check a new archive, and give it its name; remove it if it is unusable.

        :return: whether the archive can be used from now on.
        """
        try:
            if not self._is_usable(path):
                return False
            path.replace(path.with_name(self._name(path)))
            self._attempts(path.parent).unlink(missing_ok=True)
            self._remove_unused(path.parent)
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return True

    def _is_usable(self, path: Path) -> bool:
        """Return whether Java can use a new archive, whose checksums it verifies."""
        command = [
            *(self.java.path, f"-XX:SharedArchiveFile={path}", "-Xshare:on"),
            *("-XX:+VerifySharedSpaces", "-cp", self.class_path, "-version"),
        ]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60
            )
        except subprocess.SubprocessError:
            return False
        return done.returncode == 0

    @staticmethod
    def _remove_unused(folder: Path) -> None:
        """Remove files that no job has used for a long time, and incomplete ones."""
        used = {
            each: each.stat().st_mtime
            for each in folder.glob("*")
            if each.suffix in (_SUFFIX, _ATTEMPTS)
        }
        archives = [
            each
            for each in sorted(used, key=used.__getitem__, reverse=True)
            if each.suffix == _SUFFIX and not each.name.startswith(_NEW)
        ]
        for each, last_use in used.items():
            is_new = each.name.startswith(_NEW)
            seconds = _MAKING_SECONDS if is_new else _RETAINED_SECONDS
            is_old = last_use < time.time() - seconds
            if is_old or each in archives[_RETAINED_ARCHIVES:]:
                each.unlink(missing_ok=True)


def _has_own_archive(java: Java) -> bool:
    home = Path(os.path.realpath(java.path)).parent.parent
    return (home / "lib" / "server" / "classes.jsa").exists()


def cache_folder() -> Path | None:
    """Return the folder, which is created; ``None`` if it cannot be used.

    Only the user may write to it.
    """
    try:
        given = os.environ.get("XDG_CACHE_HOME", "")
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        folder = base / "synapse-replication"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        others_write = found.st_mode & 0o022
        if found.st_uid != os.geteuid() or others_write:
            return None
    except (OSError, RuntimeError):
        # The folder cannot be created, or the user has no home.
        return None
    return folder if os.access(folder, os.R_OK | os.X_OK) else None
