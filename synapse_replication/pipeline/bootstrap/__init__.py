"""Positions computed from the tables, for a deployment that lost them."""
