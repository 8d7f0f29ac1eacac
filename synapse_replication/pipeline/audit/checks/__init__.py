"""The checks of an audit: functions from data frames to findings, without I/O."""
