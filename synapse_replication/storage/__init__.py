"""Stream positions, ids and rows in Postgres."""
