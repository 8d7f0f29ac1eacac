"""Helpers for Spark itself: sessions, Java and failures."""
