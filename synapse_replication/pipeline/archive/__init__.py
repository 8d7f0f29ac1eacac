"""The archive: rows of the streams as files, and the jobs that write them."""
