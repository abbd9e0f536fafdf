"""Holds the commands of `diptych`: a module each, found by `main`'s table, importing only what it needs.

Each command runs in a process of its own. No other package imports this one. Commands are in rooms by what an operator
does: `setup`, `ask`, `observe`, `operate`, `sizing`, `measure`.

What commands share is in rooms, too: `plans` (what is decided), `platform` (a platform on this machine), `requests`
(clients) and `reports` (what is printed).
"""
