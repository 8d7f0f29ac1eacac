"""The report: counts and plots on one HTML page."""
