"""The programs that the scripts in the parent folder run; not part of the wheel."""
