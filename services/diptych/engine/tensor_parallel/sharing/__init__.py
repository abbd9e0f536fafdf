"""Schedulers that share experts: where they meet, the clock of their steps, and the collectives of all their ranks."""
