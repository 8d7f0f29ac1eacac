"""The programs behind the scripts one folder up; no part of the wheel."""
