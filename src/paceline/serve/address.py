"""Where a server listens."""

from __future__ import annotations

import os
import socket

from paceline.errors import AddressError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections there; raises ``AddressError``, before a model has been loaded in vain."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressError(host, port, str(error)) from error
    except OSError as error:
        raise AddressError(host, port, os.strerror(error.errno or 0)) from error


def url_of(listener: socket.socket) -> str:
    """The address that a socket really has; port 0 has become a number."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
