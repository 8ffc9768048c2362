"""Drivers of the peers, run beside marq in the same run and against the same broker."""
