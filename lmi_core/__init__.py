"""A large-model inference server: configuration, engine, models and adapters."""

from lmi_core.version import __version__

__all__ = ["__version__"]
