"""Reads reasoning and tool calls out of output as it comes: formats are generators. Pure."""
