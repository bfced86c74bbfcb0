"""Work whose size a request decides, in children with limits of time and memory.

``pool.py`` keeps a few of them, ``process.py`` is one of them as its parent sees it, ``child.py``
the child itself, ``message.py`` what they exchange.
"""
