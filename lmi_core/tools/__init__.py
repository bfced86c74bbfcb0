"""Tools that a model may call: what it is told of them, and its calls found in what it writes."""
