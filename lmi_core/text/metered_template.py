"""Chat templates that are rendered beside other work: programs, which a meter stops.

Each loop, call, filter, operator and output is charged before it is done: one unit, and one more
for every 512 characters that it handles; a loop one for each item. What the meter doesn't know is
stopped at once. A template that is stopped isn't refused: it is rendered again where time and
memory are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.filters import FILTERS
from jinja2.nodes import EvalContext, Node
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer

_UNITS, _LEAST_UNITS = 10_000, 1_000
_FREE_CHARS = 4096
"""Longer inputs get fewer units, since some operations on them are not charged."""
_SIZE = 512
_FILTERS = frozenset({
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "groupby", "int", "items", "join", "last", "length", "list", "lower", "map", "reject",
    "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string",
    "sum", "title", "tojson", "trim", "truncate", "unique", "upper",
})  # fmt: skip
_METHODS = frozenset({
    "capitalize", "count", "endswith", "find", "get", "index", "isdigit", "items", "keys", "lower",
    "lstrip", "removeprefix", "removesuffix", "rfind", "rsplit", "rstrip", "split", "splitlines",
    "startswith", "strip", "title", "upper", "values",
})  # fmt: skip
_CALLABLES = (Macro, LoopContext, BlockReference)


_is_metered = ContextVar("is_metered", default=False)


class CostlyTemplateError(Exception):
    """Rendering takes more than is taken beside other work."""


@contextmanager
def metered() -> Iterator[None]:
    """Within, templates that cost too much raise CostlyTemplateError."""
    token = _is_metered.set(True)
    try:
        yield
    finally:
        _is_metered.reset(token)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """One template's environment. ``globals`` and filters that are set on it cost a unit a call."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self, **options: Any) -> None:
        # Without folding of constants: that would happen while the template is compiled.
        super().__init__(finalize=self._output, optimized=False, **options)
        self._left: float | None = None
        """Units; None: nothing is charged."""
        self._plain: tuple[Any, ...] = (self.globals["range"], dict, Namespace)
        for name in FILTERS:
            self.set_filter(name, self.filters[name])
        self.filters["_iterated"] = self._iterated
        self.filters["_joined"] = self._joined

    def set_filter(self, name: str, function: Callable[..., Any]) -> None:
        self.filters[name] = self._metered_filter(name, function)

    def set_function(self, name: str, function: Callable[..., Any]) -> None:
        """A function that a template may call, whose cost doesn't depend on what it is given."""
        self.globals[name] = function
        self._plain += (function,)

    def start(self, num_chars: int) -> None:
        """Begin a render of that many characters of messages."""
        if not _is_metered.get():
            self._left = None
            return
        self._left = max(_LEAST_UNITS, _UNITS * _FREE_CHARS / max(_FREE_CHARS, num_chars))

    def _spend(self, size: int = 0) -> None:
        if self._left is not None:
            self._left -= 1 + size / _SIZE
            if self._left < 0:
                raise CostlyTemplateError

    def _refuse(self) -> None:
        if self._left is not None:
            raise CostlyTemplateError

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        transformed: nodes.Template = _Transformer().visit(tree)
        return transformed

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(function, "__self__", None)
        if isinstance(function, _CALLABLES):
            self._spend()
            if isinstance(function, LoopContext) and args:
                args = (self._iterated(args[0]), *args[1:])
        elif owner is not None and isinstance(owner, str | dict | list):
            if getattr(function, "__name__", "") == "replace":
                self._spend(_replaced(owner, *args))
            elif getattr(function, "__name__", "") not in _METHODS:
                self._refuse()
            self._spend(len(owner))
        elif any(function is plain for plain in self._plain):
            self._spend()
        else:
            self._refuse()
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self._spend(_size(left) + _size(right))
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            self._refuse()
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, Sized) and isinstance(other, int):
                    self._spend(len(one) * max(0, other))
                elif isinstance(one, int) and one.bit_length() > 64:
                    self._refuse()
        return super().call_binop(context, operator, left, right)

    @pass_eval_context
    def _output(self, _: EvalContext, value: Any) -> Any:
        self._spend(_size(value))
        return value

    def _iterated(self, values: Iterable[Any]) -> Iterable[Any]:
        """What a loop goes over, paid for."""
        if not isinstance(values, Sized):
            return self._counted(values)
        self._spend(len(values) * _SIZE)
        return values

    def _counted(self, values: Iterable[Any]) -> Iterator[Any]:
        for value in values:
            self._spend()
            yield value

    def _joined(self, values: list[Any]) -> str:
        """The ``~`` operator."""
        texts = [str(value) for value in values]
        self._spend(sum(map(len, texts)))
        return "".join(texts)

    def _metered_filter(self, name: str, function: Any) -> Any:
        passes = getattr(function, "jinja_pass_arg", None) is not None

        def metered(*args: Any, **kwargs: Any) -> Any:
            if self._left is None:
                return function(*args, **kwargs)
            if name not in _FILTERS:
                self._refuse()
            place = 1 if passes else 0
            value, rest = args[place], args[place + 1 :]
            if isinstance(value, Iterable) and not isinstance(value, Sized):
                value = list(self._counted(value))
            self._spend(_size(value) * (_SIZE if isinstance(value, list | range) else 1))
            if name == "join":
                self._spend(_size(value) * _size(rest[0] if rest else kwargs.get("d", "")))
            elif name == "replace":
                self._spend(_replaced(value, *rest, **kwargs))
            result = function(*args[:place], value, *rest, **kwargs)
            self._spend(_size(result))
            return result

        if passes:
            metered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return metered


class _Transformer(NodeTransformer):
    """Puts the meter where Jinja has no hook for it."""

    def visit_For(self, node: nodes.For) -> Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_iterated", [], [], None, None).set_lineno(node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> Node:
        self.generic_visit(node)
        joined = nodes.List(node.nodes).set_lineno(node.lineno)
        return nodes.Filter(joined, "_joined", [], [], None, None).set_lineno(node.lineno)


def _size(value: Any) -> int:
    return len(value) if isinstance(value, Sized) else 0


def _replaced(text: Any, *args: Any, **kwargs: Any) -> int:
    """At most how long a text becomes by ``replace``."""
    old, new = (str(value) for value in (*args, *kwargs.values(), "", "")[:2])
    return len(new) * (_size(text) // max(1, len(old)) + 1)
