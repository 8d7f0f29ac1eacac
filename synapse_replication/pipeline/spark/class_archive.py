"""The archive of Java's classes in the user's cache folder, which halves Spark's start.

A Java process with ``-XX:SharedArchiveFile`` maps the classes that an earlier process
has loaded and verified (*class data sharing*), instead of reading them from the jars.
The first job makes the archive at its end, and later ones use it. It takes 100 to
200 MB, and is bound to a Java and to the jars: a hash of both is in its name.

Such an archive extends the one of Java's own classes, which is a part of most Javas,
but not of the wheel's: for that one, none is made.

Nothing depends on it. Java itself ignores an archive that does not match, and none is
made if the folder cannot be written, belongs to another user, or has little space. Java
checks a new archive completely, and it gets its name, which includes its size, only
then: an incomplete one is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Final

import attrs

from synapse_replication.pipeline.spark.java import Java

#: The free space in bytes below which no archive is made.
_ENOUGH_SPACE: Final = 2**30

#: The age in s at which an archive that no job has used is removed.
_RETAINED_SECONDS: Final = 30 * 86_400

_SUFFIX: Final = ".jsa"

#: Silences Java's remarks about archives, which it would print to standard output.
_QUIET: Final = ("-Xlog:disable", "-Xlog:all=error:stderr")


@attrs.frozen
class ClassArchive:
    """The archive for one Java and one class path.

    :ivar folder: the folder of all archives; ``None`` if no folder can be used.
    :ivar key: identifies Java and the jars.
    """

    java: Java
    class_path: str
    folder: Path | None
    key: str

    @classmethod
    def of(cls, java: Java, class_path: str) -> ClassArchive:
        """Return the archive, which need not exist.

        The folder is ``synapse-replication`` in ``XDG_CACHE_HOME``, by default
        ``~/.cache``. Only the user may write to it, because Java trusts the classes.
        """
        digest = hashlib.sha256(f"{java.path}\n{java.build}\n".encode())
        for each in class_path.split(os.pathsep):
            digest.update(each.encode())
            with contextlib.suppress(OSError):
                found = os.stat(each)
                digest.update(f" {found.st_size} {found.st_mtime_ns}\n".encode())
        key = f"java{java.version}-{digest.hexdigest()[:16]}"
        return cls(java, class_path, cache_folder(), key)

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

    @staticmethod
    def options_to_make(path: Path) -> list[str]:
        """Return the options of a Java process that writes an archive at its end."""
        return [f"-XX:ArchiveClassesAtExit={path}", *_QUIET]

    def new_file(self) -> Path | None:
        """Create the file for a new archive; ``None`` if that is not possible.

        Each process has its own file, so that several jobs may do this at once.
        """
        if self.folder is None or not _has_own_archive(self.java):
            return None
        try:
            if shutil.disk_usage(self.folder).free < _ENOUGH_SPACE:
                return None
            number, name = tempfile.mkstemp(_SUFFIX, ".new-", self.folder)
        except OSError:
            return None
        os.close(number)
        # Java does not overwrite a file.
        os.unlink(name)
        return Path(name)

    def adopt(self, path: Path) -> bool:
        """Check a new archive, and give it its name; remove it if it is unusable.

        :return: whether the archive can be used from now on.
        """
        try:
            if not self._is_usable(path):
                return False
            path.replace(path.with_name(self._name(path)))
            self._remove_old(path.parent)
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
    def _remove_old(folder: Path) -> None:
        """Remove archives that no job has used for a long time."""
        limit = time.time() - _RETAINED_SECONDS
        for each in folder.glob(f"*{_SUFFIX}"):
            if each.stat().st_mtime < limit:
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
