"""Options of the server, including limits on requests, the API key, and the address to listen on.
The options are defined in a separate module so that the command line can use them without importing
the server.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firstlight.errors import ConfigError, StorageError
from firstlight.files.atomic import read_file

#: Environment variable that contains the API key.
KEY_VARIABLE = "FIRSTLIGHT_API_KEY"

_MAX_KEY_BYTES = 4096

#: Maximum number of choices per prompt.
MAX_CHOICES = 8
#: Maximum number of prompts in a request, and maximum number of token ids in a prompt that is sent
#: as token ids. The encoder also enforces the model's context limit.
MAX_PROMPTS, MAX_PROMPT_IDS = 64, 200_000
#: Maximum number of messages in a conversation, and maximum number of content parts in a message.
MAX_MESSAGES, MAX_PARTS = 512, 64
#: Maximum number of tools in a request, and maximum number of tool calls in a message.
MAX_TOOLS = 128
#: Maximum number of stop strings, and maximum length of a stop string in characters.
MAX_STOPS, MAX_STOP_CHARS = 4, 256
#: Maximum value of `logprobs` in a completion request, and of `top_logprobs` in a chat request.
MAX_LOGPROBS, MAX_CHAT_LOGPROBS = 5, 20
#: Maximum number of entries of `logit_bias`.
MAX_BIASES = 1024
#: Maximum total number of keys and objects in a JSON body. Without this limit, validating a body of
#: a million bytes that consists mostly of keys would delay the responses to other clients.
MAX_NAMES = 20_000
#: Default of `max_tokens` in completion requests, as in OpenAI's API. In a chat request without
#: `max_tokens`, the answer can fill the context.
COMPLETION_TOKENS = 16
#: Maximum number of connections that the operating system queues until the server accepts them.
BACKLOG = 1024


@dataclass(frozen=True)
class Limits:
    """Limits on requests and connections. They can be changed with the server's options.

    Attributes:
        request_timeout: maximum time in seconds from when a request is queued until its response is
            complete.
        header_timeout: maximum time in seconds for a request's headers to arrive.
        body_timeout: maximum time in seconds for a request's body to arrive.
        write_timeout: maximum time in seconds that a client can leave response data unread.
        max_body_bytes: maximum size of a request's body, in bytes.
        max_header_bytes: maximum size of a request's headers, in bytes.
        max_connections: maximum number of simultaneous connections. Beyond it, a new connection
            replaces an idle one; if none is idle, the new connection is refused with status 503.
    """

    request_timeout: float = 600.0
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 30.0
    max_body_bytes: int = 2**20
    max_header_bytes: int = 16 * 2**10
    max_connections: int = 512


_MOST = 2**31
#: Minimum and maximum value of each numeric option.
_RANGES = {
    "port": (0, 65535),
    "max_batch_size": (1, 4096),
    "max_queue": (0, _MOST),
    "max_context_tokens": (2, _MOST),
    "shutdown_timeout": (0, _MOST),
    "request_timeout": (0.001, _MOST),
    "header_timeout": (0.001, _MOST),
    "body_timeout": (0.001, _MOST),
    "write_timeout": (0.001, _MOST),
    "max_body_bytes": (1, _MOST),
    "max_header_bytes": (256, 2**20),
    "max_connections": (1, 2**20),
}


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server, which specify its address, access control and limits.

    Attributes:
        host: name or address to listen on; any address other than a loopback address requires an
            API key.
        port: port to listen on; 0 selects any free port.
        model_name: name of the model, as shown to clients.
        api_key: key that clients must send; None disables the check.
        allowed_hosts: additional name that requests can use for the server, as the value of the
            Host header; can be given more than once.
        allowed_origins: origin of another web page that is allowed to send requests, as the value
            of the Origin header; can be given more than once.
        max_batch_size: maximum number of sequences that are generated simultaneously.
        max_queue: maximum number of sequences that wait to be generated; beyond it, requests are
            refused with status 429.
        compile: decode with torch.compile; compiling takes one or two minutes before the first
            request.
        max_context_tokens: maximum number of tokens in a sequence, including prompt and answer;
            defaults to the model's limit.
        template_options: default values for variables of the chat template, which requests can
            override.
        shutdown_timeout: time in seconds that running answers have to finish after a shutdown
            signal.
        limits: limits on requests and connections.

    Raises:
        ConfigError: other machines could use the server without an API key, or a value is out of
            range.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str = "model"
    api_key: bytes | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    max_batch_size: int = 8
    max_queue: int = 64
    compile: bool = False
    max_context_tokens: int | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    shutdown_timeout: float = 10.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"{self.host} can be reached from other machines: set an API key in the "
                f"environment variable {KEY_VARIABLE} or with --api-key-file"
            )
        if "*" in self.allowed_origins:
            raise ConfigError(
                "allowed_origins can't be '*', which would let every web page use this server: "
                "list each origin, such as https://chat.example"
            )
        values = {**vars(self), **vars(self.limits)}
        for name, (least, highest) in _RANGES.items():
            value = values[name]
            # This form of the condition also rejects NaN, because all comparisons with NaN are
            # false.
            if value is not None and not least <= value <= highest:
                raise ConfigError(f"{name} must be between {least} and {highest}, not {value}")


def checked_key(key: bytes, where: str) -> bytes:
    """Return the API key if it can be sent in a header. Otherwise, raise an error.

    Args:
        key: the API key.
        where: source of the key, used in error messages.

    Raises:
        ConfigError: the key is empty or contains characters other than visible ASCII.
    """
    if not key:
        raise ConfigError(f"the API key in {where} is empty: set a key, or remove it")
    if not all(0x21 <= byte <= 0x7E for byte in key):
        raise ConfigError(
            f"the API key in {where} must be a single line of visible ASCII characters without "
            "spaces"
        )
    return key


def key_from_file(path: Path) -> bytes:
    """Read the API key from a file that contains a single line.

    Raises:
        InputError: the file can't be read.
        ConfigError: see `checked_key`.
    """
    return checked_key(read_file(path, _MAX_KEY_BYTES).rstrip(b"\r\n"), str(path))


def is_loopback(host: str) -> bool:
    """Return True if a name or address (IPv6 without brackets) is reachable only from this
    machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening_socket(host: str, port: int) -> socket.socket:
    """Open the socket that the server listens on. Port 0 selects any free port.

    Raises:
        ConfigError: the host does not name an address of this machine.
        StorageError: the address is in use, or the process is not permitted to use it.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"can't listen on {host}: {error}; set --host to an address of this machine"
        ) from error
    family, _, _, _, address = addresses[0]
    try:
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        # Avoid the error's full message, because it repeats the address.
        reason = os.strerror(error.errno) if error.errno else str(error)
        where = f"{host} port {port}"
        raise StorageError(f"can't listen on {where}: {reason}; choose another --port") from error


def url_for(listening: socket.socket) -> str:
    """Return the URL of a listening socket. In the URL, a wildcard address is replaced by the
    loopback address.
    """
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
