"""Spark itself: sessions, Java, failures."""
