"""The job that computes positions from the tables, if a deployment has lost them."""
