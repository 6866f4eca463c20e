"""Answer images with a classifier over HTTP: python serve.py RUN [PORT]. POST an image file."""

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch

import dpvision
from dpvision.errors import DPVisionError

if len(sys.argv) < 2:
    sys.exit(__doc__)
classifier = dpvision.load_classifier(sys.argv[1])


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        file = self.rfile.read(min(int(self.headers.get("Content-Length", 0)), 1 << 26))
        try:
            x_BCHW = torch.from_numpy(classifier.preprocess(file))[None]
            with torch.inference_mode():
                found = classifier.probabilities(x_BCHW)[0].tolist()
            status, answer = 200, dict(zip(classifier.class_names, found, strict=True))
        except DPVisionError as error:  # not an image, damaged, too large
            status, answer = 400, {"error": str(error)}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


server = HTTPServer(("127.0.0.1", int((sys.argv[2:] or ["8000"])[0])), Handler)
print(f"http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
