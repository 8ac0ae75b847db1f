"""Rows of files of any type, from this disk or a hub.

Begin with `sources` (paths, folders and globs to files) and `data_file` (rows of one file).
`hub_download` fetches a repository at one commit and verifies it. It imports `system` and
`settings`. `encoding` decides what a row means."""
