"""Calls of clients as the console shows them: those that run, the last that ended, and where their time went."""
