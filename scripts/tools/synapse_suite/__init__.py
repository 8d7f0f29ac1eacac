"""The homeserver's own tests as a black box: on stock replication, then on ours.

The tests come from the homeserver's source distribution, which is fetched and unpacked
into a private folder. No part of that distribution is part of this package.
"""
