"""One running process: its services, host, site and status page."""
