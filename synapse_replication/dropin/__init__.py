"""The only subpackage that uses Synapse's own classes."""
