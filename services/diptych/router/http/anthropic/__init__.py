"""`/v1/messages`: Anthropic's request, answer, stream and errors."""
