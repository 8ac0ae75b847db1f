"""Bytes per KiB, MiB and GiB."""

KIB, MIB, GIB = 2**10, 2**20, 2**30
