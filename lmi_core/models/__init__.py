"""Models: the decoder written once, families as data, weights and where they come from.

``loader.load_model`` reads a directory (``hf_config``, ``registry``, ``checkpoint``) into a
``DecoderSpec`` and packed weights; ``decoder.record`` records them into a step graph. A new family
is a module in ``families`` and a line in ``registry``. Imports ``lmi_core.ops`` and nothing above.
"""
