"""Measure a server, a process offline, single steps and KV transfers: `diptych bench`."""
