"""A local address that stays open when what is behind it closes."""

import contextlib
import socket
import threading


def open_door(address: str) -> str:
    """A local address that leads to another, and does not close when that one does."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, target: socket.socket, close: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
        if close:
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)  # not close: the other thread reads from it

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            try:
                far = socket.create_connection((host.strip("[]"), int(port)))
            except OSError:
                near.close()  # not up yet: JAX tries again
                continue
            for connection in (near, far):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends in ((near, far, True), (far, near, False)):
                threading.Thread(target=pass_on, args=ends, daemon=True).start()

    threading.Thread(target=serve, name="door", daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"
