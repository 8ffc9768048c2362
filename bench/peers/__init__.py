"""Drivers of the peers, which run in the same run as marq, on the same broker."""
