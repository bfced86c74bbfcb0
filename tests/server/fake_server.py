"""A server process around the scripted engine: ``python -m tests.server.fake_server OPTIONS``.

OPTIONS is a JSON object of FakeEngine's fields and, under "server", of ServerOptions'.
"""

from __future__ import annotations

import asyncio
import json
import sys

from lmi_core.errors import LmiError
from lmi_server.http.lifecycle import run_server
from lmi_server.http.logging import setup_logging
from lmi_server.http.metrics import Metrics
from lmi_server.http.options import Listening, ServerOptions
from lmi_server.models.model import recipe_of_engine
from lmi_server.models.model_registry import ModelRegistry
from tests.server.fake_engine import FakeEngine


def main() -> int:
    settings = json.loads(sys.argv[1])
    server = settings.pop("server", {})
    if "management" in server:
        server["management"] = Listening(*server["management"])
    options = ServerOptions(**server)
    setup_logging(options.log_format)

    def announce(text: str) -> None:
        print(text, flush=True)

    try:
        models = ModelRegistry(
            options, Metrics(), [recipe_of_engine(FakeEngine(**settings), options)]
        )
        asyncio.run(run_server(models, announce=announce))
    except LmiError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
