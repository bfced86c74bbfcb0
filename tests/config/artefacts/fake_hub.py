"""A hub in a thread: one repository, served by the routes that the hub's client asks."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit


class FakeHub:
    """Serves the files of ``directory`` as the model org/m at ``commit``."""

    def __init__(self, directory: Path, commit: str) -> None:
        self.directory = directory
        self.commit = commit
        self.downloads: list[tuple[str, str | None]] = []
        self.refuse: tuple[int, str] | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Serve until the block ends; gives the address."""
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *args: object) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        """Answer one request."""
        path = unquote(urlsplit(request.path).path)
        if self.refuse is not None:
            status, code = self.refuse
            self._send(request, b"", status, {"X-Error-Code": code})
        elif path.startswith("/api/models/org/m/revision/"):
            files = [{"rfilename": name} for name in sorted(self._names())]
            body = {"_id": "x", "id": "org/m", "sha": self.commit, "siblings": files}
            self._send(request, json.dumps(body).encode())
        elif path.startswith("/api/models/org/m/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": self._etag(data)}
                for name in sorted(self._names())
                for data in [(self.directory / name).read_bytes()]
            ]
            self._send(request, json.dumps(entries).encode())
        elif path.startswith((f"/org/m/resolve/{self.commit}/", "/org/m/resolve/main/")):
            self._file(request, path.rpartition("/")[2])
        else:
            self._send(request, b"", 404, {"X-Error-Code": "RepoNotFound"})

    def _names(self) -> list[str]:
        return [path.name for path in self.directory.iterdir()]

    def _etag(self, data: bytes) -> str:
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    def _file(self, request: http.server.BaseHTTPRequestHandler, name: str) -> None:
        if name not in self._names():
            self._send(request, b"", 404, {"X-Error-Code": "EntryNotFound"})
            return
        data = (self.directory / name).read_bytes()
        headers = {"ETag": f'"{self._etag(data)}"', "X-Repo-Commit": self.commit}
        wanted = request.headers.get("Range")
        if request.command == "GET":
            self.downloads.append((name, wanted))
        status = 200
        if wanted is not None and request.command == "GET":
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        self._send(request, data, status, headers)

    def _send(
        self,
        request: http.server.BaseHTTPRequestHandler,
        body: bytes,
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        request.send_response(status)
        for name, value in (headers or {}).items():
            request.send_header(name, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
