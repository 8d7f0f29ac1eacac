"""The demonstration: real rows between real processes, with faults, and a check."""
