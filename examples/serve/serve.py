"""Answer images with a classifier over HTTP: python serve.py RUN [PORT]. POST an image file."""

import contextlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

import dpvision
from dpvision.errors import DPVisionError

MAX_BYTES = 64 << 20

if len(sys.argv) < 2:
    sys.exit(__doc__)
classifier = dpvision.load_classifier(sys.argv[1])
one_at_a_time = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    timeout = 30  # seconds without a byte, after which the connection is closed

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client is gone
            super().handle()

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, {"status": "ok"})
        else:
            self.answer(404, {"error": f"GET {self.path}; expected /health. POST an image file."})

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length")
        if length is None:
            self.answer(411, {"error": "no Content-Length; expected the file's size. Send it."})
        elif not length.isdecimal():
            self.answer(400, {"error": "Content-Length; expected a whole number. Correct it."})
        elif len(length) > 8 or int(length) > MAX_BYTES:
            rule = f"expected at most {MAX_BYTES} bytes. Send a smaller file."
            self.answer(413, {"error": f"Content-Length={length[:20]}; {rule}"})
        elif len(file := self.rfile.read(int(length))) < int(length):
            rule = f"expected {length}. Send the whole file."
            self.answer(400, {"error": f"body={len(file)} bytes; {rule}"})
        else:
            try:
                with one_at_a_time, torch.inference_mode():
                    x_BCHW = torch.from_numpy(classifier.preprocess(file))[None]
                    found = classifier.probabilities(x_BCHW)[0].tolist()
                self.answer(200, dict(zip(classifier.class_names, found, strict=True)))
            except DPVisionError as error:  # not an image, damaged, too large
                self.answer(400, {"error": str(error)})

    def answer(self, status: int, content: dict) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())


server = ThreadingHTTPServer(("127.0.0.1", int((sys.argv[2:] or ["8000"])[0])), Handler)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
with contextlib.suppress(KeyboardInterrupt):
    server.serve_forever()
