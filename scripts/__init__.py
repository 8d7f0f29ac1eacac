"""What develops, measures and breaks the package; not part of the wheel."""
