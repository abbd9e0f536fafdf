"""OpenAI's API: chat, completions, responses and models; what is asked and how the answer is laid out."""
