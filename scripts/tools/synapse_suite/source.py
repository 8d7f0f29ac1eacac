"""Fetches the source distribution of the installed homeserver from the package index.

``pip download`` would build the distribution, which requires a compiler. The file is
therefore looked up on the index's simple page, and its hash is verified if the page has
one.
"""

from __future__ import annotations

import hashlib
import html
import json
import os
import re
import ssl
import subprocess
import sys
import tarfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import attrs

DISTRIBUTION = "matrix-synapse"

_DEFAULT_INDEX = "https://pypi.org/simple"
_JSON = "application/vnd.pypi.simple.v1+json"
#: The timeout for a response of the index, in s.
_TIMEOUT = 120.0
_LINK = re.compile(r'<a\s[^>]*?href="([^"]+)"[^>]*>([^<]+)</a>', re.IGNORECASE)
#: Folders that are not unpacked, because the installed package is tested.
_EXCLUDED = ("synapse/", "rust/")


class SourceError(Exception):
    """The source distribution cannot be fetched, or does not match the index."""


@attrs.frozen
class SourceFile:
    """A file of the index.

    :ivar url: the URL of the file.
    :ivar sha256: the hash of the file, in hexadecimal; ``None`` if the index has none.
    """

    url: str
    sha256: str | None


def fetch(version: str, folder: Path) -> Path:
    """Fetch the source distribution of a version and unpack it.

    :param folder: an empty folder.
    :return: the folder that contains ``tests``.
    :raises SourceError: if the index cannot be reached, does not have the version, or
        returns a file with another hash.
    """
    settings = _pip_settings()
    context = ssl.create_default_context(cafile=settings.get("cert"))
    index = settings.get("index-url", _DEFAULT_INDEX).rstrip("/")
    page = f"{index}/{DISTRIBUTION}/"
    try:
        kind, data = _get(page, context)
        file = find_file(page, kind, data.decode(), version)
        _, content = _get(file.url, context)
    except OSError as error:
        raise SourceError(f"{page} cannot be read: {error}") from error
    found = hashlib.sha256(content).hexdigest()
    if file.sha256 is not None and file.sha256 != found:
        raise SourceError(f"{file.url} has the hash {found}, not {file.sha256}")
    archive = folder / "source.tar.gz"
    archive.write_bytes(content)
    return unpack(archive, folder)


def _pip_settings() -> dict[str, str]:
    """Return pip's index URL and its TLS settings."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    # Put the environment last, because it has precedence.
    lines = sorted(listed.splitlines(), key=lambda line: line.startswith(":env:"))
    settings = {}
    for line in lines:
        key, _, value = line.partition("=")
        settings[key.rpartition(".")[2]] = value.strip("'\"")
    return settings


def _get(url: str, context: ssl.SSLContext) -> tuple[str, bytes]:
    request = urllib.request.Request(
        url, headers={"Accept": f"{_JSON}, text/html;q=0.5"}
    )
    with urllib.request.urlopen(request, context=context, timeout=_TIMEOUT) as answer:
        return answer.headers.get_content_type(), answer.read()


def find_file(page: str, kind: str, text: str, version: str) -> SourceFile:
    """Find the source distribution of a version on a simple page.

    :param page: the URL of the page.
    :param kind: the media type of the page; HTML is assumed unless it is JSON.
    :raises SourceError: if the page does not list the source distribution.
    """
    wanted = {
        f"{name}-{version}.tar.gz"
        for name in (DISTRIBUTION, DISTRIBUTION.replace("-", "_"))
    }
    files = _json_files(text) if kind == _JSON else _html_files(text)
    for name, url, sha256 in files:
        if name in wanted:
            return SourceFile(urllib.parse.urljoin(page, url), sha256)
    raise SourceError(f"{page} has no source distribution of {version}")


def _json_files(text: str) -> Iterator[tuple[str, str, str | None]]:
    for file in json.loads(text)["files"]:
        yield file["filename"], file["url"], file["hashes"].get("sha256")


def _html_files(text: str) -> Iterator[tuple[str, str, str | None]]:
    for url, name in _LINK.findall(text):
        address, _, fragment = html.unescape(url).partition("#")
        sha256 = urllib.parse.parse_qs(fragment).get("sha256", [None])[0]
        yield name.strip(), address, sha256


def unpack(archive: Path, folder: Path) -> Path:
    """Unpack a source distribution, except for the package itself.

    :return: the folder that contains ``tests``.
    :raises SourceError: if the archive contains no such folder.
    """
    with tarfile.open(archive) as tar:
        members = [
            member
            for member in tar.getmembers()
            if not f"{member.name}/".partition("/")[2].startswith(_EXCLUDED)
        ]
        if hasattr(tarfile, "data_filter"):
            tar.extractall(folder, members, filter="data")
        else:  # pragma: no cover -- not in the first releases of Python 3.10 and 3.11
            tar.extractall(folder, members)
    for found in sorted(folder.glob("*/tests")):
        return Path(os.path.realpath(found.parent))
    raise SourceError(f"{archive} contains no tests")


def find_modules(source: Path, name: str) -> list[str]:
    """Return the test modules of a package; for any other name, the name itself.

    :param source: the folder that contains ``tests``.
    """
    folder = source.joinpath(*name.split("."))
    if not folder.is_dir():
        return [name]
    found = sorted(folder.rglob("test_*.py"))
    return [".".join(path.relative_to(source).with_suffix("").parts) for path in found]
