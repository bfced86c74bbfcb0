"""text-embeddings-inference's protocol."""
