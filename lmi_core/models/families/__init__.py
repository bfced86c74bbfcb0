"""Families of models as data, one module each."""
