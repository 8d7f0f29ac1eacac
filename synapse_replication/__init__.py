"""Drop-in replication between the instances of a homeserver, built on Twisted.

Import what you need from :mod:`synapse_replication.api`. This package's own
``__init__`` imports nothing, so that the pure core (``streams`` and ``wire``)
can be used where there is no reactor.
"""

__version__ = "0.3.0.dev0"
