"""Opens a model's files: configuration, tokenizer and weights, from GGUF or a Hugging Face folder. No torch.

`source.open_model` is the door. Opening reads headers only; weights are yielded one at a time, as they are stored,
or cut to the part of a rank (`shard`).
"""
