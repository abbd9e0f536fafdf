"""One file a model family: its configuration and the names in its checkpoints. No file here computes anything."""
