"""Protocols, a package each behind the seam in ``base``; ``table`` says who answers a path."""
