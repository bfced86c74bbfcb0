"""Models: the decoder written once, families as data, weights and where they come from."""
