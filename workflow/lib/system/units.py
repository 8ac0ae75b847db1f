"""Bytes per KiB, MiB and GiB."""

MIB = 2**20


KIB, MIB, GIB = 2**10, 2**20, 2**30


GIB = 2**30


GIB = 2**30


MIB = 2**20
