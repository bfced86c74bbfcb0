"""Custom ``model.py`` code: run in processes of its own, called by frames over a socket.

``pool.py`` is where to start; ``child.py`` is the other side of the socket. What the child imports
(``child*.py``, ``frame.py``, ``compat/``) needs the standard library only, so that any interpreter
can run it.
"""
