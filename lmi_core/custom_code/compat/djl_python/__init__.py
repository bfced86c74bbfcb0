"""``djl_python`` as a ``model.py`` knows it: its inputs, outputs and formatters, nothing else.

It is importable in a handler's process only, and only where no other package of the name is
installed. Source: what DJL-Serving's djl_python does.
"""

from .inputs import Input
from .outputs import Output

__all__ = ["Input", "Output"]
