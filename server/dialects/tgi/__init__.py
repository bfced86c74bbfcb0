"""text-generation-inference: routes, bodies and answers."""
