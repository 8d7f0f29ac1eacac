"""The homeserver's own tests as a black box: on stock replication, then on ours.

They come in its source distribution, which is fetched, unpacked into a private folder
and run there; nothing of it is part of this package.
"""
