"""The demonstration: processes that replicate recorded rows in spite of faults."""
