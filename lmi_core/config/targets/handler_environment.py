"""Secrets of the server that a model's own code doesn't inherit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmi_core.config.rows import Row
from lmi_core.config.sources.environment import secret_variables
from lmi_core.config.sources.merge import SECRET, Values
from lmi_core.config.table.option import Outcome

KEY = "option.handler_environment"


def withheld(values: Values, environ: Mapping[str, str], *, tgi: bool) -> tuple[str, ...]:
    """Names of the variables that open this server, but for those that the operator passes on.

    Variables that the server only uses itself, such as a hub's token, handlers use too.
    """
    named = values.get(KEY)
    passed = named if isinstance(named, tuple) else ()
    return tuple(name for name in secret_variables(environ, tgi=tgi) if name not in passed)


def withheld_rows(names: Sequence[str]) -> tuple[Row, ...]:
    """What an explanation says of them."""
    text = f"a secret of the server, which the model's code doesn't get unless {KEY} names it"
    return tuple(Row(f"environment/{n}", SECRET, n, Outcome.NO_EFFECT, text) for n in names)
