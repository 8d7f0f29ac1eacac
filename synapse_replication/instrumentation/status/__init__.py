"""The state of a process as a value, and the observer that updates it."""
