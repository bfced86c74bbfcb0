"""What configuration becomes: the choice of a backend, and each target's settings."""
