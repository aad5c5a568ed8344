"""A Hub on 127.0.0.1: what huggingface.co answers when a config.json is asked for, and how it fails.

The repository's name says how it behaves: acme/plain, acme/gated-401, acme/hang-get, …
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEWER = "89abcdef0123456789abcdef0123456789abcdef"
CONFIG = {"model_type": "llama", "num_hidden_layers": 4}
QUANT = {"quantization": {"kv_cache_quant_algo": "FP8"}}

Headers = dict[str, str]

INVALID_CREDENTIALS = {"X-Error-Message": "Invalid credentials in Authorization header"}
REFUSALS: dict[str, tuple[int, Headers]] = {
    "typo": (401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}),
    "typo-404": (404, {"X-Error-Code": "RepoNotFound"}),
    "gated-401": (401, {"X-Error-Code": "GatedRepo"}),
    "gated-403": (403, {"X-Error-Code": "GatedRepo"}),
    "forbidden": (403, {"X-Error-Message": "missing permission"}),
    "disabled": (403, {"X-Error-Message": "Access to this resource is disabled."}),
    "no-revision": (404, {"X-Error-Code": "RevisionNotFound"}),
    "no-config": (404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}),
    "bad-token": (401, INVALID_CREDENTIALS),
    "limited": (429, {"Retry-After": "120"}),
    "limited-rfc": (429, {"ratelimit": '"resolvers";r=0;t=55'}),
    "error-500": (500, {}),
    "error-503": (503, {}),
    "proxied-407": (407, {}),
    "teapot": (418, {}),
}
"""How a repository is refused: the status and the headers, for HEAD and GET alike."""


@dataclass
class Hub:
    """The running server: what it was asked, and what a test may change about it."""

    url: str
    cdn_url: str = ""
    commit: str = COMMIT
    files: dict[str, bytes] = field(default_factory=dict)
    """What acme/weights holds, and nothing else."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    cdn_authorizations: list[str | None] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)

    def asked(self, method: str) -> list[str]:
        """The paths asked for with that method."""
        return [path for verb, path in self.requests if verb == method]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    is_cdn = False

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_CONNECT(self) -> None:
        self.hub.requests.append(("CONNECT", self.path))
        self._send(407, {})

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        if self.is_cdn:
            self.hub.cdn_authorizations.append(self.headers["Authorization"])
            self._send(200, {}, json.dumps(CONFIG).encode())
            return
        self.hub.requests.append((self.command, self.path))
        if self.path.startswith("http://"):  # we are the proxy
            self._send(407, {})
            return
        repo, _, rest = self.path.partition("/resolve/")
        behaviour, filename = repo.split("/")[-1], rest.rpartition("/")[2]
        if behaviour == "weights":
            self._weights(filename)
        elif behaviour in REFUSALS:
            self._send(*REFUSALS[behaviour])
        elif filename == "hf_quant_config.json" and behaviour == "quantised-limited":
            self._send(*REFUSALS["limited"])
        elif filename == "hf_quant_config.json" and behaviour != "quantised":
            self._send(*REFUSALS["no-config"])
        else:
            self._serve(behaviour, filename, rest)

    def _serve(self, behaviour: str, filename: str, rest: str) -> None:
        config = {**CONFIG, "quantization_config": {}} if behaviour == "says-itself" else CONFIG
        body = json.dumps(QUANT if filename == "hf_quant_config.json" else config).encode()
        headers = {"ETag": f'"{filename}-{self.hub.commit[:7]}"', "X-Repo-Commit": self.hub.commit}
        linked = {"X-Linked-Size": str(len(body)), "X-Linked-Etag": headers["ETag"]}
        is_get = self.command == "GET"
        if behaviour == "hang" or (behaviour == "hang-get" and is_get):
            self.hub.closing.wait(60)
        elif behaviour == "drip":
            self._drip()
        elif behaviour == "cut":
            self.close_connection = True
        elif behaviour in ("limited-get", "error-get") and is_get:
            self._send(*REFUSALS["limited" if behaviour == "limited-get" else "error-500"])
        elif behaviour == "renamed":
            self._send(307, {**headers, "Location": f"/acme/plain/resolve/{rest}"})
        elif behaviour == "mirrored":
            self._send(302, {**headers, "Location": f"{self.hub.url}/acme/plain/resolve/{rest}"})
        elif behaviour == "on-cdn":
            self._send(302, {**headers, **linked, "Location": f"{self.hub.cdn_url}/blob"})
        elif behaviour == "circle":
            self._send(302, {**headers, "Location": self.path})
        elif behaviour == "portal":
            self._send(200, {"Content-Type": "text/html"}, b"<html>Log in</html>")
        elif behaviour == "large":
            self._send(200, headers, b" " * (9 * 2**20))
        else:
            self._send(200, headers, b"[]" if behaviour == "list" else body)

    def _weights(self, filename: str) -> None:
        """A file, or the part of it that is asked for."""
        body = self.hub.files.get(filename)
        if body is None:
            self._send(*REFUSALS["no-config"])
            return
        headers = {"ETag": f'"{filename}"', "X-Repo-Commit": self.hub.commit}
        start, _, end = (self.headers["Range"] or "").removeprefix("bytes=").partition("-")
        if not start:
            self._send(200, headers, body)
            return
        self._send(206, headers, body[int(start) : int(end or len(body)) + 1])

    def _drip(self) -> None:
        """A byte now and then: no single read is late, and the answer never ends."""
        self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Drip: ")
        while not self.hub.closing.wait(0.3):
            self.wfile.write(b".")

    def _send(self, status: int, headers: Headers, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that gave up is what the tests provoke: nothing to report."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A Hub and, on another port, the CDN that it redirects to."""
    hub = Hub(url="")
    servers = []
    for is_cdn in (False, True):
        handler = type("Handler", (_Handler,), {"hub": hub, "is_cdn": is_cdn})
        server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    hub.url, hub.cdn_url = (f"http://127.0.0.1:{s.server_address[1]}" for s in servers)
    try:
        yield hub
    finally:
        hub.closing.set()
        for server in servers:
            server.shutdown()
            server.server_close()
