"""Requests and their answers as they were kept, and the proof that they are answered so again."""
