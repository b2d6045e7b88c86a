"""A web server on this machine, in place of those that corpora come from."""

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(BaseHTTPRequestHandler):
    """Serves `files` by name.  A folder before the name makes it fail in a way of its own: /cut/name breaks off half
    way.  Knows what it was asked for."""

    files: dict[str, bytes] = {}
    asked: list[tuple[str, int]] = []  # path, first byte
    failures = 0  # so many answers are errors, then it works

    def do_GET(self):
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        self.asked.append((self.path, start))
        *how, name = self.path.strip("/").split("/")
        if Server.failures:
            Server.failures -= 1
            return self.send_error(503)
        if name not in self.files:
            return self.send_error(404)
        if "moved" in how:
            self.send_response(302)
            self.send_header("Location", f"/{name}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        if start and start >= len(self.files[name]):
            return self.send_error(416)
        body = b"not what was asked for" if "wrong" in how else self.files[name][start:]
        self.send_response(206 if start and "norange" not in how else 200)
        if "norange" in how:  # a server that does not know Range sends everything again
            body = self.files[name]
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if "slow" in how:
            time.sleep(2)
        self.wfile.write(body[: len(body) // 2] if "cut" in how else body)
        self.close_connection = True

    def log_message(self, *_):
        pass


@contextmanager
def serve(files: dict[str, bytes]):
    """The address of a server of these."""
    Server.files, Server.asked, Server.failures = files, [], 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
