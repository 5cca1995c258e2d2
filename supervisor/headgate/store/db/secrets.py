"""The keys that encrypt trigger kwargs and other secrets.

There are one or several Fernet keys: the first encrypts, and all decrypt, so a key is rotated by putting the new one
first. They are read from the environment, or from a file that is created on first use. No message shows a key.
"""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from headgate.store.errors import BadKey, UnusableKey

KEY_FILE_NAME = "fernet.key"
KEY_FILE_BYTES_MAX = 64 * 1024  # a key has 44 characters: a longer file is not a key file


class Secrets:
    """Encrypts and decrypts; `Secrets.open` reads the keys."""

    def __init__(self, keys: Sequence[str], *, source: str) -> None:
        """Take url-safe base64 keys of 32 bytes, newest first, read from ``source``. Raises `UnusableKey`."""
        if not keys:
            raise UnusableKey(f"there is no encryption key in {source}")
        fernets = []
        for number, key in enumerate(keys, start=1):
            try:
                fernets.append(Fernet(key))
            except ValueError:
                # The library's error is dropped, because its text may show the key.
                raise UnusableKey(
                    f"key {number} of {len(keys)} in {source} is malformed: "
                    f"a key is 32 bytes in url-safe base64, 44 characters"
                ) from None
        self._fernet = MultiFernet(fernets)
        self._keys_count = len(fernets)

    def __repr__(self) -> str:
        return f"<Secrets with {self._keys_count} keys>"

    @classmethod
    def open(cls, home: Path, environment_value: str | None) -> Secrets:
        """Return the keys of the environment (comma separated), else those of ``home / "fernet.key"`` (one a line).

        If neither exists, the file is created with a new key, readable by its owner only. Raises `UnusableKey`.
        """
        if environment_value is not None:
            keys = [key.strip() for key in environment_value.split(",")]
            return cls([key for key in keys if key], source="the setting of the encryption keys")
        path = home / KEY_FILE_NAME
        try:
            if not path.exists():
                _make_key_file(path)
            return cls(_read_key_file(path), source=str(path))
        except OSError as error:
            raise UnusableKey(f"the key file {path} cannot be used: {error.strerror or error}") from error

    def encrypt(self, data: bytes) -> str:
        """Return ``data`` under the first key, as printable text."""
        return self._fernet.encrypt(data).decode("ascii")

    def decrypt(self, text: str) -> bytes:
        """Return the encrypted data in clear. Raises `BadKey` if no key fits, or if the text was tampered with."""
        try:
            return self._fernet.decrypt(text)
        except (InvalidToken, ValueError):
            known = "the one key" if self._keys_count == 1 else f"any of the {self._keys_count} keys"
            raise BadKey(f"the kwargs cannot be decrypted with {known} this supervisor has") from None


def _make_key_file(path: Path) -> None:
    """Create the file atomically, so that two processes that try at once both use the same complete file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(Fernet.generate_key() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, path)
        except FileExistsError:
            return  # another process was first, and its key is used
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # without the file, nothing that is encrypted from now on could be read
        finally:
            os.close(folder)
    finally:
        draft.unlink()


def _read_key_file(path: Path) -> list[str]:
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise UnusableKey(f"the key file {path} can be read by others (mode {mode:04o}): run chmod 600 on it")
        content = file.read(KEY_FILE_BYTES_MAX + 1)
    if len(content) > KEY_FILE_BYTES_MAX:
        raise UnusableKey(f"the key file {path} is longer than {KEY_FILE_BYTES_MAX:,} bytes: it is no key file")
    lines = content.decode("ascii", errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip()]
