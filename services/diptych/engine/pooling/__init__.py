"""From the hidden states of prompts to one vector each: embeddings, and scores of labels."""
