"""Words for prompts that are too long, wherever they were tokenised."""

from __future__ import annotations


def words_too_long(prompt_len: int, context_len: int) -> str:
    """Say so of a prompt that leaves no room for output, wherever it was tokenised."""
    return (
        f"the prompt has {prompt_len} tokens; with at least one token of output that is more than the context of "
        f"{context_len} tokens"
    )


def words_far_too_long(max_tokens: int) -> str:
    """Say so of a prompt that was not tokenised to its end."""
    return f"the prompt has more than {max_tokens} tokens, which is too many here: make it shorter"
