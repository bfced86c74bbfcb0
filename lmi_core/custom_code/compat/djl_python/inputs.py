"""What a handler is called with."""

from __future__ import annotations

import csv
import importlib
import io
import json
from typing import Any

from .pair_list import PairList


class Input:
    """One request, or a batch of them; without content, the call that initialises the handler.

    The ``get_as_*`` methods read the item of a key. Without a key they read the item named
    ``data``, else the first one, and return None when there is no content; a key that isn't there
    raises KeyError.
    """

    def __init__(
        self,
        properties: dict[str, str] | None = None,
        content: PairList | None = None,
        batches: list[Input] | None = None,
    ) -> None:
        self.properties = {} if properties is None else properties
        self.content = PairList() if content is None else content
        self._batches = batches

    def get_properties(self) -> dict[str, str]:
        """Headers and settings; of the initialising call, the model's configuration."""
        return self.properties

    def get_property(self, key: str) -> str | None:
        """A property by its name in any case, or None."""
        if key in self.properties:
            return self.properties[key]
        wanted = key.lower()
        for name, value in self.properties.items():
            if name.lower() == wanted:
                return value
        return None

    def get_content(self) -> PairList:
        """Every item; of a batch, with keys such as ``batch_000.data``."""
        return self.content

    def contains_key(self, key: str) -> bool:
        return self.content.contains_key(key)

    def is_empty(self) -> bool:
        """Whether this is the call that initialises the handler."""
        return self.content.is_empty()

    def is_batch(self) -> bool:
        """Whether several requests came in this call."""
        return self._batches is not None

    def get_batches(self) -> list[Input]:
        """One ``Input`` per request, in order of arrival."""
        return [self] if self._batches is None else self._batches

    def get_as_bytes(self, key: str | None = None) -> bytes | None:
        if key is not None:
            return self.content.get(key)
        if self.content.is_empty():
            return None
        return self.content.get("data") if self.contains_key("data") else self.content.value_at(0)

    def get_as_string(self, key: str | None = None) -> str | None:
        value = self.get_as_bytes(key)
        return None if value is None else value.decode("utf-8")

    def get_as_json(self, key: str | None = None) -> Any:
        """Raises ValueError naming the fault when the item isn't JSON."""
        value = self.get_as_bytes(key)
        return None if value is None else json.loads(value)

    def get_as_numpy(self, key: str | None = None) -> Any:
        """An array in NumPy's .npy format."""
        value = self.get_as_bytes(key)
        if value is None:
            return None
        import numpy

        return numpy.load(io.BytesIO(value), allow_pickle=False)

    def get_as_npz(self, key: str | None = None) -> list[Any] | None:
        """The arrays of an .npz archive, in its order."""
        value = self.get_as_bytes(key)
        if value is None:
            return None
        import numpy

        with numpy.load(io.BytesIO(value), allow_pickle=False) as arrays:
            return list(arrays.values())

    def get_as_image(self, key: str | None = None) -> Any:
        """An image of Pillow, which the model's requirements must name."""
        value = self.get_as_bytes(key)
        if value is None:
            return None
        return importlib.import_module("PIL.Image").open(io.BytesIO(value))

    def get_as_csv(self, key: str | None = None) -> list[dict[str, str]] | None:
        """The rows of a table with a header line."""
        text = self.get_as_string(key)
        return None if text is None else list(csv.DictReader(io.StringIO(text)))
