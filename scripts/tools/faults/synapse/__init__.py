"""Real faults on a real Synapse: five processes, checked from outside."""
