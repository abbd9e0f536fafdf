"""Tokenizers, chat templates and detokenizers, with bounds on what a prompt may cost. No torch."""
