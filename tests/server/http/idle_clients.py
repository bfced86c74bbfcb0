"""Many connections that say nothing: ``python -m tests.server.http.idle_clients PORT NUMBER``.

Prints the number of open connections, and leaves them open until its input ends.
"""

from __future__ import annotations

import resource
import socket
import sys


def main() -> None:
    port, number = int(sys.argv[1]), int(sys.argv[2])
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    clients = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(number)]
    print(len(clients), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
