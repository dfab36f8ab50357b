"""CURVE keys of engines and frontends, in files of ZeroMQ's certificate format.

An engine's folder holds `engine.key_secret`, `engine.key`, and in `clients` the public keys of the frontends that may
connect. A frontend's folder holds `engine.key` and its own `client.key_secret`.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path

import zmq
import zmq.auth
from msgspec import Struct

CURVE_KEY_LENGTH = 40
"""Characters of a CURVE key in Z85."""
CLIENTS = "clients"
"""Subfolder of the keys that may connect."""
_FRONTENDS = "frontends"
"""Subfolder with one folder to copy to each frontend."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeyPair(Struct, frozen=True):
    """A CURVE key pair, in Z85."""

    public: bytes
    secret: bytes


class Curve(Struct, frozen=True):
    """CURVE keys of one process, in Z85.

    A frontend needs the engine's public key, and a key pair of its own that the engine knows.
    """

    public: bytes
    """The engine's public key."""
    secret: bytes | None = None
    """The engine's secret key."""
    client: KeyPair | None = None
    """Key pair with which this process connects to the engine."""
    clients: Path | None = None
    """Folder of the public keys that the engine accepts besides its own; None accepts any key."""

    def client_pair(self) -> KeyPair:
        """Return the key pair to connect with.

        A process that has the engine's secret key is trusted as the engine and connects with its pair; one without keys
        of its own makes a pair that only an engine that accepts any key lets in.
        """
        if self.client is not None:
            return self.client
        if self.secret is not None:
            return KeyPair(self.public, self.secret)
        return KeyPair(*zmq.curve_keypair())


def load_key(path: Path) -> tuple[bytes, bytes | None]:
    """Load the public and, if there is one, the secret key of a file.

    Raises ValueError if it does not contain a CURVE key.
    """
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path} does not contain a CURVE key: {error}") from error
    if any(key is not None and len(key) != CURVE_KEY_LENGTH for key in (public, secret)):
        raise ValueError(f"{path} does not contain a CURVE key of {CURVE_KEY_LENGTH} characters")
    return public, secret


def load_curve(directory: Path, any_client: bool = False) -> Curve:
    """Load the CURVE keys of a folder.

    The engine's come from `engine.key_secret` if it exists, otherwise from `engine.key`. Raises ValueError if there is
    neither. any_client: accept frontends with any key.
    """
    secret_file, public_file = directory / "engine.key_secret", directory / "engine.key"
    own = directory / "client.key_secret"
    for path in (secret_file, public_file):
        if path.is_file():
            public, secret = load_key(path)
            client = None
            if own.is_file():
                client_public, client_secret = load_key(own)
                if client_secret is None:
                    raise ValueError(f"{own} contains a public key only; copy the file from the engine's folder again")
                client = KeyPair(client_public, client_secret)
            return Curve(public, secret, client, None if any_client else directory / CLIENTS)
    raise ValueError(
        f"{directory} contains neither {secret_file.name} nor {public_file.name}; for an engine run `tandem keys "
        f"{directory}`, for a frontend copy its folder from the engine's host (`tandem keys DIR --client NAME`)"
    )


def make_curve(directory: Path) -> tuple[Path, Path]:
    """Write a new key pair of an engine, and an empty folder for keys of clients.

    Return the paths of the pair (public, secret). The files are readable only by their owner. Raises FileExistsError if
    the directory has keys: running engines may use them.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if (directory / "engine.key_secret").exists():
        raise FileExistsError(errno.EEXIST, "it contains keys already; remove them first", str(directory))
    with _private_files():
        public, secret = zmq.auth.create_certificates(directory, "engine")
    (directory / CLIENTS).mkdir(mode=0o700, exist_ok=True)
    return Path(public), Path(secret)


def make_client(directory: Path, name: str) -> tuple[Path, Path]:
    """Write a new key pair of a frontend and let the engine accept it.

    Return the accepted public key and the folder to copy to the frontend. Raises ValueError for a bad name or a folder
    without the engine's keys, FileExistsError if the name is taken.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} cannot name a key: use 1 to 64 letters, digits and . _ - and begin with no sign")
    engine_key = directory / "engine.key"
    public, _ = load_key(engine_key) if engine_key.is_file() else (b"", None)
    if not public:
        raise ValueError(f"{directory} does not contain engine.key; run `tandem keys {directory}` first")
    accepted, folder = directory / CLIENTS / f"{name}.key", directory / _FRONTENDS / name
    if accepted.exists() or folder.exists():
        raise FileExistsError(errno.EEXIST, f"there is a client {name} already; choose another name", str(directory))
    with _private_files():
        accepted.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, parents=True)
        zmq.auth.create_certificates(folder, "client")
        (folder / "engine.key").write_bytes(engine_key.read_bytes())
        # Renamed atomically: a running engine reads the folder at any moment.
        unfinished = accepted.with_suffix(".new")
        (folder / "client.key").replace(unfinished)
        unfinished.replace(accepted)
    return accepted, folder


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """Make new files readable only by their owner."""
    mask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(mask)
