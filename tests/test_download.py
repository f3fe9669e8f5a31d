"""Published sets from their addresses, and the command that makes them ready."""

import dataclasses
import hashlib
import http.server
import io
import os
import re
import threading

import numpy as np
import pytest

from data import prepared
from data.prepare import prepare
from data.prepared import is_whole, open_set
from data.sets import SETS
from data.sets.release import Download
from tests import sets
from tests.processes import fork
from tests.sets import refused, small

pytestmark = pytest.mark.quick


# --- downloads ---


class Server(http.server.BaseHTTPRequestHandler):
    content, ranges, stop_after, asked = b"", True, None, []

    def do_GET(self):
        begin = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        self.asked.append(begin)
        if begin >= len(self.content) > 0 and self.ranges:
            self.send_error(416)
            return
        begin = begin if self.ranges else 0
        body = self.content[begin:]
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.stop_after])

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    handler = type("Handler", (Server,), {"asked": []})
    with http.server.ThreadingHTTPServer(("localhost", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        handler.url = f"http://localhost:{running.server_address[1]}/enwik8.zip"
        yield handler
        running.shutdown()


def served(server, **facts):
    """enwik8 from that address, with what is known of its archive."""
    return dataclasses.replace(small("enwik8"), downloads=(Download("enwik8.zip", server.url, ("enwik8",), **facts),))


def archive_of(text: bytes) -> bytes:
    file = io.BytesIO()
    sets.zipped(file, {"enwik8": text})
    return file.getvalue()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_goes_on_where_it_was_cut_off(tmp_path, server, ranges):
    server.content, server.ranges = archive_of(os.urandom(3000)), ranges
    facts = {"size": len(server.content), "sha256": hashlib.sha256(server.content).hexdigest()}
    server.stop_after = 1000
    assert "it ended after 1,000 of" in refused(served(server, **facts), tmp_path)
    assert (tmp_path / "enwik8.zip.part").stat().st_size == 1000
    server.stop_after = None
    prepare(served(server, **facts), tmp_path)
    assert server.asked == [0, 1000]
    assert (tmp_path / "enwik8.zip").read_bytes() == server.content and not (tmp_path / "enwik8.zip.part").exists()
    assert is_whole(tmp_path, "enwik8")


def test_a_download_that_was_all_there_is_not_asked_for_again(tmp_path, server):
    server.content = archive_of(b"text")
    (tmp_path / "enwik8.zip.part").write_bytes(server.content)
    prepare(served(server), tmp_path)
    assert server.asked == [len(server.content)] and is_whole(tmp_path, "enwik8")


def test_a_download_with_a_wrong_checksum_is_thrown_away(tmp_path, server):
    server.content = archive_of(b"text")
    facts = {"size": len(server.content), "sha256": "0" * 64}
    assert "it was thrown away" in refused(served(server, **facts), tmp_path)
    assert not list(tmp_path.glob("enwik8*"))


def test_without_internet_the_line_says_which_file_to_put_where(tmp_path, server):
    release = served(server)
    server.content = b""
    for path in ("enwik8.zip", "of/enwik8.zip"):
        gone = dataclasses.replace(release.downloads[0], url="http://localhost:1/enwik8.zip", path=path)
        line = refused(dataclasses.replace(release, downloads=(gone,)), tmp_path)
        assert re.search(
            rf"cannot fetch http://localhost:1/enwik8.zip \(.*\); put that file at {tmp_path}/{path}", line
        )
        assert not list(tmp_path.iterdir()), "not even a folder"


# --- the command ---


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["mnsit"], "unknown set 'mnsit'; choose from cifar10, .*; closest: mnist"),
        ([], "no set is named; choose from cifar10, enwik8, "),
        (["mnist", "--rot=x"], "unknown flag --rot; closest: --root"),
        (["mnist", "--root=/proc/nowhere"], "cannot write below '/proc/nowhere'"),
        (["mnist", "--root=LICENSE"], "cannot write below 'LICENSE'"),
        (["mnist", "--root="], "--root is ''; allowed: a text that is not empty"),
    ],
)
def test_mistakes_on_the_command_line(words, says):
    command = fork("data.prepare", *words)
    assert command.wait() == 2, command.stderr
    assert len(command.stderr.splitlines()) == 1 and re.search(f"error: .*{says}", command.stderr), command.stderr


def test_the_command_says_what_it_made_and_refuses_what_is_not_the_release(tmp_path):
    sets.put(tmp_path / "mnist", sets.digits(4))
    command = fork("data.prepare", "mnist", f"--root={tmp_path}")
    assert command.wait() == 2 and "wrong checksum" in command.stderr and len(command.stderr.splitlines()) == 1
    sets.ready(tmp_path, "mnist", numbers=np.arange(3))
    command = fork("data.prepare", "mnist", f"--root={tmp_path}")
    assert command.wait() == 0, command.stderr
    digest = open_set(str(tmp_path), "mnist").digest
    assert command.stdout.splitlines()[1:] == [
        "mnist: numbers int64 [3]",
        f"mnist: {prepared.folder(tmp_path, 'mnist')}, digest {digest[:16]}",
    ]


def test_every_set_has_a_line_and_an_address():
    for name, release in SETS.items():
        assert release.name == name and release.summary.endswith(".") and len(release.summary) < 110
        assert all(one.url.startswith("http") for one in release.downloads)
        assert release.sha256 or release.rows or name in ("lra_pathfinder64", "lra_pathfinder256")
