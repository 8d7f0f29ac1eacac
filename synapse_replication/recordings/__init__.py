"""Traffic of a real deployment, as data; ``app/recordings.py`` reads it."""
