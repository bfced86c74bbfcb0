"""Stored formats: checkpoints as they lie on disk, matrices as they are packed."""
