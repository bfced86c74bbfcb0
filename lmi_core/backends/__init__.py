"""Other engines behind the same configuration and requests; each imports its library lazily."""
