"""The line protocol over direct TCP connections."""
