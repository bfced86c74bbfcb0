"""OpenAI: routes, bodies and answers."""
