"""Models: the decoder written once, families as data, and how both get their weights.

``found_model.py`` reads a directory's settings and headers into a ``DecoderSpec``, ``loader.py``
its weights, packed; ``decoder.py`` records both into a step graph. A new family is a module in
``families`` and a line in ``registry.py``. Imports ``lmi_core.ops`` and nothing above.
"""
