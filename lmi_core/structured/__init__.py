"""Structured output: grammars that a request's text must follow.

``grammar.py`` is what a request asks for, ``matcher.py`` the interface of a library that can tell
which tokens may come next, ``compiler.py`` the cache in front of it, ``guidance.py`` the library.
"""
