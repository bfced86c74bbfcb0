"""Copies of a model in processes of their own, behind one that takes the requests: README.md."""
