"""An HTTP server that speaks the Hugging Face hub's API for a few repositories, each a folder on this machine."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SHA = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_of(repositories, gated=(), sizes=None):
    """Serve folders by `models/NAME` and `datasets/NAME`. Yields the address and the list of the requests.

    Of the `gated` ones only the description can be read. `sizes` has sizes that are told in place of the files' own.
    """
    requests = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path, _, _ = self.path.partition("?")
            requests.append(f"{self.command} {path}")
            kind, name, what, rest = parsed(path)
            folder = repositories.get(f"{kind}/{name}")
            if folder is None:
                return self.reply(b"", 401, {"X-Error-Code": "RepoNotFound"})
            if what in ("info", "revision"):
                return self.reply_json({"id": name, "sha": SHA, "siblings": []})
            files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
            if what == "tree":
                return self.reply_json([self.entry(folder, file) for file in files])
            if f"{kind}/{name}" in gated:
                return self.reply(b"", 403, {"X-Error-Code": "GatedRepo"})
            file = folder / rest
            if file not in files:
                return self.reply(b"", 404, {"X-Error-Code": "EntryNotFound"})
            content = file.read_bytes()
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            told = {"Content-Length": str((sizes or {}).get(rest, len(content)))} if self.command == "HEAD" else {}
            return self.reply(content, 200, {"ETag": etag, "X-Repo-Commit": SHA, **told})

        def entry(self, folder, file):
            path = str(file.relative_to(folder))
            size = (sizes or {}).get(path, file.stat().st_size)
            return {"type": "file", "path": path, "size": size, "oid": hashlib.sha1(file.read_bytes()).hexdigest()}

        def reply_json(self, content):
            self.reply(json.dumps(content).encode(), 200, {"Content-Type": "application/json"})

        def reply(self, content, code, headers):
            self.send_response(code)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.handle_error = lambda *_: None  # a client that leaves early
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
    finally:
        server.shutdown()
        server.server_close()


def parsed(path):
    """Return kind, name, what is asked for, and the rest of `/api/models/A/B/tree/SHA` or `/datasets/A/B/resolve/SHA/FILE`."""
    parts = path.strip("/").split("/")
    if parts[0] == "api":
        kind, owner, name, *more = parts[1:]
        return kind, f"{owner}/{name}", more[0] if more else "info", ""
    kind = "datasets" if parts[0] == "datasets" else "models"
    owner, name, _, _, *rest = parts[kind == "datasets" :]
    return kind, f"{owner}/{name}", "file", "/".join(rest)
