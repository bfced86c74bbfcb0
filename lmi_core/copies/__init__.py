"""Copies of a model in processes of their own, behind one that takes the requests.

``copies.py`` is what a server uses; ``dispatch.py`` and ``router.py`` decide which copy runs a
request, and again when it is lost; ``supervisor.py`` keeps copies running; ``process.py`` is one of
them as the server sees it, ``child.py`` the process itself, ``connection.py`` and ``outbox.py``
what they exchange.
"""
