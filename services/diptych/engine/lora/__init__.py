"""Low-rank adapters (LoRA, https://arxiv.org/abs/2106.09685): what is loaded, who uses it, how it is read."""
