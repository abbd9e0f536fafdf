"""LoRA adapters in the forward pass: their products, and where the loaded ones are kept."""
