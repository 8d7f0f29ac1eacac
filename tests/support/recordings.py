"""The recording of a real deployment; the package ships its beginning."""

from __future__ import annotations

from pathlib import Path

#: The complete traffic: 21,168 commands, 10,159 of them rows.
FULL_RECORDING = Path(__file__).parent / "data" / "startup_drive.jsonl.xz"
