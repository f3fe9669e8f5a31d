"""The line between the processes of a run: small messages beside the arrays, and a watch over who is still there.

Every process holds a TCP connection to the first one, which passes on what is said. The kernel closes the connection of
a process that dies, however it dies, so the others know within moments which one is gone; one that is merely stopped
keeps its connection and falls silent, and is waited for. Waiting on the line has no time limit of its own: it ends when
the others answer, or when one of them is lost and this process ends with it.
"""

import collections
import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from train.exit_codes import RESTART

LOST = RESTART  # exit code of a process that ended because another was lost
BEAT = 2.0  # seconds between signs of life
HUSH = 10.0  # of silence before it is mentioned; then again after twice as long, and so on
PATIENCE = 900.0  # before a silent process counts as lost
UNREACHABLE = 15  # before a host that does not even acknowledge packets does

AGAIN = "this process ends too; start the job again and it resumes"

Message = dict[str, Any]


def end_process(code: int, text: str) -> NoReturn:
    """Ends this process at once: nothing that could wait for the others runs any more."""
    try:
        with contextlib.suppress(OSError):  # nobody may be there to read
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode())
    finally:
        os._exit(code)


class Line:
    """One process's end of the line. `sockets` leads the first process to all others, and those to the first."""

    def __init__(
        self,
        rank: int,
        names: list[str],
        sockets: dict[int, socket.socket],
        end: Callable[[int, str], None] = end_process,
    ):
        self.rank, self.names = rank, names
        self._sockets, self._end_process = sockets, end
        self._buffers = {rank: bytearray() for rank in sockets}
        self._changed = threading.Condition()  # guards all below, and sending
        self._rounds: collections.Counter[str] = collections.Counter()
        self._given: dict[str, dict[int, Any]] = {}  # the first process collects here
        self._results: dict[str, list[Any]] = {}
        self._asked, self._halted, self._stop_at = 0, False, None  # see stop_requested
        self._reached: dict[int, int] = {}
        self._gone: set[int] = set()  # said goodbye
        self._ending = False
        now = time.monotonic()
        self._heard = dict.fromkeys(sockets, now)
        self._mentioned = dict.fromkeys(sockets, HUSH)
        self._woken, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="line", daemon=True)
        self._thread.start()

    # What processes do together

    def gather(self, topic: str, value: Any) -> list[Any]:
        """What each process gave, by rank; all of them must ask. Values are what JSON can hold."""
        with self._changed:
            tag = f"{topic} {self._rounds[topic]}"
            self._rounds[topic] += 1
            self._say({"kind": "give", "tag": tag, "value": value})
            while tag not in self._results:
                self._changed.wait()
            return self._results.pop(tag)

    def stop(self) -> None:
        """Asks all processes to stop at one and the same step. May be called by a signal handler."""
        os.write(self._wake.fileno(), b"s")

    def stop_requested(self) -> bool:
        """To be asked once a dispatch by every process; true at the same one for all, and from then on.

        When a stop is asked for, each process reports from the background how often it has asked, and its next
        question waits for the outcome: one more than the most. Nobody has passed that one, and all will come to it.
        """
        with self._changed:
            while self._halted and self._stop_at is None:
                self._changed.wait()
            self._asked += 1
            return self._stop_at is not None and self._asked >= self._stop_at

    def silent(self) -> str:
        """Who has not been heard of for a while; empty: nobody known to this process."""
        now = time.monotonic()
        return ", ".join(self._who(rank) for rank, heard in self._heard.items() if now - heard > HUSH)

    def fail(self, code: int, text: str, everywhere: bool = False) -> None:
        """Tells the others that this process ends, and why; they end too. `everywhere`: they fail in the same way."""
        with self._changed:
            self._ending = True
            said = text if everywhere else f"{self._who(self.rank)}: {text}"
            self._say({"kind": "fail", "rank": self.rank, "code": code, "text": said})
        time.sleep(0.2)  # a connection closed with messages unread may lose those on their way

    def close(self) -> None:
        """Takes leave of the others, who may go on."""
        with self._changed:
            if self._ending:
                return
            self._ending = True
            self._say({"kind": "bye", "rank": self.rank})
        os.write(self._wake.fileno(), b"q")
        self._thread.join(5)
        for connection in self._sockets.values():
            connection.close()

    # What the first process hears, and what it tells all

    def _say(self, message: Message) -> None:
        if self.rank == 0:
            self._collect(0, message)
        else:
            self._send(0, message)

    def _collect(self, rank: int, message: Message) -> None:
        kind = message["kind"]
        if kind == "give":
            given = self._given.setdefault(message["tag"], {})
            given[rank] = message["value"]
            if len(given) == len(self.names):
                del self._given[message["tag"]]
                values = [given[rank] for rank in range(len(self.names))]
                self._tell_all({"kind": "result", "tag": message["tag"], "values": values})
        elif kind == "stop" and not self._halted:
            self._tell_all({"kind": "halt"})
        elif kind == "reached":
            self._reached[rank] = message["asked"]
            if len(self._reached) == len(self.names):
                self._tell_all({"kind": "stop_at", "asked": max(self._reached.values()) + 1})
        elif kind == "fail":
            self._tell_all(message)
        elif kind == "bye":
            self._gone.add(rank)
            if rank == 0:
                self._tell_all(message)

    def _tell_all(self, message: Message) -> None:
        for rank in self._sockets:
            self._send(rank, message)
        self._obey(message)

    def _obey(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "result":
            self._results[message["tag"]] = message["values"]
        elif kind == "halt":
            self._halted = True
            self._say({"kind": "reached", "asked": self._asked})
        elif kind == "stop_at":
            self._stop_at = message["asked"]
        elif kind == "bye":
            self._gone.add(message["rank"])
        elif kind == "lost":
            self._end(LOST, f"error: {self._who(message['rank'])} {message['text']}; {AGAIN}")
        elif kind == "fail" and message["rank"] != self.rank:
            mistake = message["code"] == 2  # starting again would not help
            self._end(2 if mistake else LOST, f"error: {message['text']}" + ("" if mistake else f"; {AGAIN}"))
        self._changed.notify_all()

    def _who(self, rank: int) -> str:
        return f"process {rank} on {self.names[rank]}"

    def _end(self, code: int, text: str) -> None:
        if not self._ending:
            self._ending = True
            self._end_process(code, text)

    # The watch

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, connection in self._sockets.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            beaten = awake = time.monotonic()
            while True:
                for key, _ in selector.select(BEAT / 2):
                    if key.data is None:
                        if self._woken.recv(1) == b"q":
                            return
                        with self._changed:
                            self._say({"kind": "stop"})
                    elif not self._receive(key.data):
                        selector.unregister(key.fileobj)
                now = time.monotonic()
                if now - awake > HUSH / 2:  # it was this process that slept
                    self._heard = dict.fromkeys(self._heard, now)
                awake = now
                if now - beaten >= BEAT:
                    beaten = now
                    self._beat()
                    self._mention(now)

    def _beat(self) -> None:
        with self._changed:
            for rank in self._sockets:
                self._send(rank, {"kind": "beat"})

    def _receive(self, rank: int) -> bool:
        """Reads what there is; false once there will be no more."""
        try:
            data = self._sockets[rank].recv(1 << 16)
        except OSError:
            data = b""
        with self._changed:
            self._heard[rank] = time.monotonic()
            self._buffers[rank] += data
            *lines, self._buffers[rank] = self._buffers[rank].split(b"\n") if b"\n" in data else [self._buffers[rank]]
            for line in lines:
                message = json.loads(line)
                if self.rank == 0:
                    self._collect(rank, message)
                else:
                    self._obey(message)
            if not data and rank not in self._gone and not self._ending:
                self._lose(rank, "is gone")
        return bool(data)

    def _lose(self, rank: int, text: str) -> None:
        """Another process is lost, and this one ends; the first tells the others."""
        lost = {"kind": "lost", "rank": rank, "text": text}
        if self.rank == 0:
            self._tell_all(lost)
        else:
            self._obey(lost)

    def _send(self, rank: int, message: Message) -> None:
        with contextlib.suppress(OSError):  # it is gone, and the watch will find out
            self._sockets[rank].sendall(json.dumps(message).encode() + b"\n")

    def _mention(self, now: float) -> None:
        """Says which process is being waited for."""
        with self._changed:
            for rank, heard in self._heard.items():
                silence = now - heard
                if rank in self._gone or silence < HUSH:
                    if self._mentioned[rank] > HUSH and rank not in self._gone:
                        print(f"{self._who(rank)} is back", file=sys.stderr, flush=True)
                    self._mentioned[rank] = HUSH
                elif silence >= PATIENCE:
                    self._lose(rank, f"gave no sign of life for {silence:.0f} s")
                elif silence >= self._mentioned[rank]:
                    self._mentioned[rank] = 2 * silence
                    print(f"waiting for {self._who(rank)}: silent for {silence:.0f} s", file=sys.stderr, flush=True)


# Making the connections


def listen() -> tuple[socket.socket, str]:
    """Where the first process waits for the others, and what they need to know to reach it: a port and a word."""
    if socket.has_dualstack_ipv6():
        listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    else:
        listener = socket.create_server(("", 0), backlog=1024)
    return listener, f"{listener.getsockname()[1]} {secrets.token_hex(16)}"


def answer(listener: socket.socket, size: int, invitation: str, **options: Any) -> Line:
    """The first process's end, once all others have called."""
    word, sockets, names = invitation.split()[1], {}, {0: socket.gethostname()}
    while len(sockets) < size - 1:
        connection, _ = listener.accept()
        connection.settimeout(10)
        hello = _read_line(connection)
        if hello is None or not hmac.compare_digest(hello.get("word", ""), word):
            connection.close()  # a port scan, say
            continue
        sockets[hello["rank"]], names[hello["rank"]] = connection, hello["name"]
    listener.close()
    known = [names[rank] for rank in range(size)]
    for connection in sockets.values():
        connection.settimeout(None)
        _keep_alive(connection)
        connection.sendall(json.dumps({"names": known}).encode() + b"\n")
    return Line(0, known, sockets, **options)


def call(host: str, invitation: str, rank: int, **options: Any) -> Line:
    """Another process's end."""
    port, word = invitation.split()
    connection = socket.create_connection((host, int(port)), timeout=60)
    hello = {"word": word, "rank": rank, "name": socket.gethostname()}
    connection.sendall(json.dumps(hello).encode() + b"\n")
    connection.settimeout(None)
    _keep_alive(connection)
    welcome = _read_line(connection)
    if welcome is None:
        raise ConnectionError("the first process hung up")
    return Line(rank, welcome["names"], {0: connection}, **options)


def _read_line(connection: socket.socket) -> Message | None:
    """One message and not a byte more; None if there is none to be had."""
    data = b""
    try:
        while not data.endswith(b"\n"):
            byte = connection.recv(1)
            if not byte or len(data) > 1 << 20:
                return None
            data += byte
        message = json.loads(data)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _keep_alive(connection: socket.socket) -> None:
    """The kernels of both hosts find out when the other is off the net; a process that is stopped does not matter."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 1000 * UNREACHABLE}
    for name, value in options.items():
        if hasattr(socket, name):  # not everywhere
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
