"""The manual; build it with ``tox -e docs``."""

from __future__ import annotations

import sys
from pathlib import Path

from synapse_replication import __version__

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "synapse_replication"
copyright = "the synapse_replication authors"
version = release = __version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx_click",
    "config_reference",
    "importable_references",
    "metrics_reference",
    "pipeline_reference",
    "reader_reference",
]
exclude_patterns = ["_build", "newsfragments"]
nitpicky = True
# Names of other projects, and those of type variables, are not looked up: the
# manual must build without the network.
nitpick_ignore_regex = [
    ("py:.*", r"(?!synapse_replication\.).*"),
]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Addresses on this machine are examples.
linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1)[:/].*"]
linkcheck_anchors = False
linkcheck_timeout = 20
# Most literal blocks are commands and their output.
highlight_language = "text"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_title = f"synapse_replication {version}"
man_pages = [
    (
        "commands",
        "synapse-replication",
        "replicate streams of rows between the processes of a homeserver",
        "the synapse_replication authors",
        1,
    )
]
