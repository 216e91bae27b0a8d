"""A server of S3 on a free port of this machine, with a bucket named `bucket`: prints its port, ends with its input."""

import logging
import sys
import urllib.request

from moto.server import ThreadedMotoServer

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
port = server.get_host_and_port()[1]
urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
print(port, flush=True)
sys.stdin.read()
server.stop()
