"""What a model's layers read of a text: measured before its weights are quantised."""
