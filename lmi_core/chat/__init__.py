"""``lmi chat``: a conversation in the terminal, with a model loaded here or with a server."""
