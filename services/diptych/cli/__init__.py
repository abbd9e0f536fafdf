"""Holds the commands of `diptych`: a module each, found by `main`'s table, importing only what it needs.

Each command runs in a process of its own. No other package imports this one.

What commands share is in rooms: `plans` (what is decided), `platform` (a platform on this machine), `requests`
(clients) and `reports` (what is printed).
"""
