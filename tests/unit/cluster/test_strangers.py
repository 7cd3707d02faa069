"""Servers that answer 200 and are no engines: a login page, a proxy, a wrong port."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ppdbench.cluster import control
from ppdbench.cluster.canary import check_canaries
from ppdbench.cluster.contract import ClusterSpec, Node
from ppdbench.cluster.counters import read_node
from ppdbench.cluster.engine import probe
from ppdbench.core.errors import EngineError
from ppdbench.core.topology import Role


class Answering(BaseHTTPRequestHandler):
    """Says the server's one answer, whatever is asked."""

    def do_GET(self):
        self.server.asked.append(self.path)
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.server.answer)))
        self.end_headers()
        self.wfile.write(self.server.answer)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def stranger():
    """A server whose ``answer`` a test sets; ``asked`` are the paths it was asked for."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        server.answer, server.asked = b"", []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def node_at(server, **fields):
    return Node("r0", Role.R, f"http://127.0.0.1:{server.server_port}", **fields)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"<html>log in</html>", "log in.*no JSON object"),
        (b"\xff\xfe", "no JSON object"),
        (b"[]", "no JSON object"),
        (b'{"data": []}', "serves no model"),
        (b'{"data": [{"name": "m"}]}', "serves no model"),
        (b'{"data": {"id": "m"}}', "serves no model"),
    ],
)
def test_a_server_that_is_no_engine_is_one_sentence(stranger, answer, words):
    """What it said, and what to check."""
    stranger.answer = answer

    with pytest.raises(EngineError, match=f"r0.*{words}.*vLLM server"):
        probe(node_at(stranger))


@pytest.mark.parametrize("answer", [b'{"object": "list"}', b'{"choices": [{"text": "x"}]}'])
def test_a_canary_without_token_ids_is_one_sentence(stranger, answer):
    """Another OpenAI server may not know ``return_token_ids``."""
    stranger.answer = answer

    with pytest.raises(EngineError, match="without token ids"):
        check_canaries(ClusterSpec((node_at(stranger),)), "m")


def test_a_metrics_address_keeps_its_query(stranger):
    """As written in the cluster file."""
    address = f"http://127.0.0.1:{stranger.server_port}/m?job=a"
    node = node_at(stranger, metrics_url=address)

    control.get(node, node.metrics_url, 5.0)

    assert stranger.asked == ["/m?job=a"]


def test_metrics_that_are_none_are_one_sentence(stranger):
    """The address is named, because ``metrics_url`` may be wrong."""
    stranger.answer = b"vllm:num_requests_running{ 3 4 5"

    with pytest.raises(EngineError, match=r"r0 at .*/metrics gives no Prometheus metrics"):
        read_node(node_at(stranger))
