"""What model architectures are, as values: configuration, families, and where each weight belongs. No torch.

A family file describes how a checkpoint is read; `diptych.engine.models` computes what is described here.
"""
