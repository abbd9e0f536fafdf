"""APIs that want no text: embeddings, classes, scores of pairs, ranks of documents."""
