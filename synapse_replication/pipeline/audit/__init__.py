"""The audit: compares recordings, tables and archive to find lost rows."""
