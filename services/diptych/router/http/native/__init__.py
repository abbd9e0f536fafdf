"""`/generate`, `/tokenize` and `/detokenize`: the native API."""
