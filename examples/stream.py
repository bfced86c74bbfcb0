"""A stream of tokens from a running server, with the standard library alone.

python examples/stream.py http://127.0.0.1:8080 "Tell me a story."
"""

from __future__ import annotations

import json
import sys
import urllib.request


def main(url: str, question: str) -> None:
    body = {
        "model": "model",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 64,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as lines:
        for line in lines:
            if line.startswith(b"data: {"):
                delta = json.loads(line[6:])["choices"][0]["delta"]
                print(delta.get("content") or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:3])
