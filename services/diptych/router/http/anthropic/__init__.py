"""`/v1/messages`: Anthropic's request, answer and stream."""
