"""The streams of a Synapse deployment, as declarations."""
