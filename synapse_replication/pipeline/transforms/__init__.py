"""Transforms: from data frame to data frame, without I/O."""
