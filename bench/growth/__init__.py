"""How cost grows with context, batch, prompt, shared prefix, adapters, vocabulary and threads."""
