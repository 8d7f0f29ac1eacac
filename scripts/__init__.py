"""Tools for development, measurements and fault injection; not part of the wheel."""
