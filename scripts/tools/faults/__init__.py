"""Real faults on real processes under load: ``scripts/faults``."""
