"""Opens a model: its configuration, its tokenizer and its weights, from GGUF or a Hugging Face folder. No torch."""
