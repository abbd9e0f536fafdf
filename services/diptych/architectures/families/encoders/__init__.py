"""Encoders: every token sees all others, and no text is made."""
