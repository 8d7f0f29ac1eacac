"""The rows of the matrix: each is one version of one component."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import attrs

#: The oldest version of Synapse on which everything works.
OLDEST_SYNAPSE = (1, 149)
DISTRIBUTION = "matrix-synapse"
#: Rows that do not vary Python use this one.
PYTHON = "3.11"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")

_SYNAPSE = "tests.external.synapse"
#: The tests with a real Synapse, by label.
SYNAPSE_TESTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attach": (f"{_SYNAPSE}.test_attach",),
        "names": (f"{_SYNAPSE}.test_classes", f"{_SYNAPSE}.test_callers"),
        "drop-in": (f"{_SYNAPSE}.test_dropin",),
        "extension": (f"{_SYNAPSE}.test_extension",),
    }
)
FAST_SYNAPSE_TESTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attach": SYNAPSE_TESTS["attach"],
        "names": SYNAPSE_TESTS["names"],
        "drop-in": (f"{_SYNAPSE}.test_dropin.DropInTests.test_three_workers_on_ours",),
        "extension": (f"{_SYNAPSE}.test_extension.DirectTcpTests",),
    }
)
_PACKAGE_TESTS = {
    "unit": (
        "tests.wire",
        "tests.streams",
        "tests.handlers",
        "tests.tcp",
        "tests.redis",
        "tests.http",
        "tests.storage",
        "tests.config",
        "tests.app",
    ),
    "processes": (
        "tests.integration.test_direct_tcp_resync",
        "tests.integration.test_extension",
        "tests.integration.test_processes",
        "tests.integration.test_redis",
        "tests.integration.test_replication",
        "tests.integration.test_tls",
    ),
}
_SERVER_TESTS = {
    "unit": ("tests.redis", "tests.storage"),
    "processes": _PACKAGE_TESTS["processes"],
}

#: What the tests of the package's parts and with its servers import. The lower bounds,
#: which are those of ``setup.cfg``, are for the row with the oldest libraries.
_TESTS_NEED = ("hypothesis >= 6.100",)


@attrs.frozen
class Row:
    """One version of one component.

    :ivar component: for instance ``Synapse``.
    :ivar version: for instance ``1.163``.
    :ivar python: the version of Python to use.
    :ivar requirements: what to install beside the package.
    :ivar lowest: whether to install the oldest versions that ``setup.cfg`` admits.
    :ivar environment: further environment variables of the tests.
    :ivar tests: the names of tests, by label.
    :ivar own_tests: whether to run the short part of the homeserver's own tests.
    """

    component: str
    version: str
    tests: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    own_tests: bool = False
    python: str = PYTHON
    requirements: tuple[str, ...] = ()
    lowest: bool = False
    environment: Mapping[str, str] = MappingProxyType({})

    @property
    def name(self) -> str:
        """The name by which the command line selects the row."""
        return f"{self.component.lower().replace(' ', '-')}-{self.version}"


def all_rows(
    *, fast: bool, redis: Sequence[Path], postgres: Sequence[Path]
) -> list[Row]:
    """Return all rows; the package index says which versions of Synapse there are.

    :param fast: whether to run only a part of the tests with a real Synapse.
    :param redis: binaries of Redis or Valkey.
    :param postgres: folders with the binaries of PostgreSQL.
    """
    return [
        *_synapse_rows(fast),
        *_python_rows(),
        *_server_rows(redis, postgres),
    ]


def _synapse_rows(fast: bool) -> Iterator[Row]:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", DISTRIBUTION],
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"\b(\d+)\.(\d+)\.\d+\b", done.stdout)
    minors = sorted({(int(major), int(minor)) for major, minor in found})
    for major, minor in minors:
        if (major, minor) >= OLDEST_SYNAPSE:
            release = f"{DISTRIBUTION}=={major}.{minor}.*"
            yield Row(
                "Synapse",
                f"{major}.{minor}",
                FAST_SYNAPSE_TESTS if fast else SYNAPSE_TESTS,
                # mypy finds what the homeserver reads from replaced objects.
                requirements=(release, "mypy"),
                environment={"SYNAPSE_REPLICATION_EXTERNAL": "synapse"},
            )
            yield Row(
                "Synapse tests",
                f"{major}.{minor}",
                own_tests=True,
                # Some of these tests need more than the homeserver requires.
                requirements=(release, "lxml", "parameterized"),
            )


def _python_rows() -> Iterator[Row]:
    more = (*_TESTS_NEED, "moto[server] >= 5.1", "setuptools >= 70.1")
    for version in PYTHONS:
        yield Row("Python", version, _PACKAGE_TESTS, python=version, requirements=more)
    yield Row(
        "Libraries",
        "oldest",
        _PACKAGE_TESTS,
        python=PYTHONS[0],
        # With a newer pyOpenSSL, the oldest Twisted cannot serve TLS.
        requirements=(*more, "pyOpenSSL==23.0.0"),
        lowest=True,
    )


def _server_rows(redis: Sequence[Path], postgres: Sequence[Path]) -> Iterator[Row]:
    for variable, binaries in (
        ("SYNAPSE_REPLICATION_REDIS_SERVER", {path: path for path in redis}),
        (
            "SYNAPSE_REPLICATION_POSTGRES_BIN",
            {folder: folder / "postgres" for folder in postgres},
        ),
    ):
        for place, binary in binaries.items():
            component, version = _version(binary)
            yield Row(
                component,
                version,
                _SERVER_TESTS,
                requirements=_TESTS_NEED,
                environment={variable: str(place)},
            )


def _version(binary: Path) -> tuple[str, str]:
    """Return the name and the version of a server.

    :raises ValueError: if its binary does not print them.
    """
    done = subprocess.run(
        [binary, "--version"], capture_output=True, text=True, check=True
    )
    found = re.search(r"(Redis|Valkey|PostgreSQL)\D*([\d.]+\d)", done.stdout)
    if found is None:
        raise ValueError(f"{binary} is neither Redis, Valkey nor PostgreSQL")
    return found[1], found[2]
