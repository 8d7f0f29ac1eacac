"""The checks of an audit: from data frame to findings, without I/O."""
