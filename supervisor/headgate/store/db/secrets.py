"""The keys that encrypt trigger kwargs and other secrets, as this machine has them.

There are one or several Fernet keys. All of them decrypt, and the database says which one encrypts
(`headgate.store.keys`), by its fingerprint. They are read from the environment, or from a file. The file is read
again if a key is asked for that was not in it, so that a process which runs already finds a new key. No message shows a
key.
"""

from __future__ import annotations

import base64
import hmac
import os
import pwd
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path

from cryptography.fernet import Fernet, InvalidToken

from headgate.store.errors import BadKey, NoKeyFile, UnusableKey, WrongKeys

KEY_FILE_NAME = "fernet.key"
KEY_FILE_BYTES_MAX = 64 * 1024  # a key has 44 characters: a longer file is not a key file
FINGERPRINT_CHARS = 16


class Secrets:
    """Encrypts and decrypts; `Secrets.open` reads the keys."""

    def __init__(
        self, keys: Sequence[str], *, source: str, path: Path | None = None, read_as: tuple[int, ...] | None = None
    ) -> None:
        """Take url-safe base64 keys of 32 bytes, read from ``source``.

        That is the file ``path`` if one is given, and ``read_as`` its state before. Raises `UnusableKey`.
        """
        self.source = source
        self.path = path
        self._read_as = read_as
        self._fernets = _fernets(keys, source)
        self._trouble = ""  # with the key file, since it was read

    @classmethod
    def none(cls) -> Secrets:
        """Return no keys: for a process that neither reads nor writes anything encrypted."""
        found = cls.__new__(cls)
        found.source, found.path, found._read_as, found._fernets = "a process without keys", None, None, {}
        found._trouble = ""
        return found

    def __repr__(self) -> str:
        return f"<Secrets with {len(self._fernets)} keys>"

    @classmethod
    def open(cls, home: Path, environment_value: str | None, *, makes_file: bool = False) -> Secrets:
        """Return the keys of the environment (see `keys_in`), else those of ``home / "fernet.key"`` (one a line).

        If neither exists, and ``makes_file`` is true, the file is created with a new key, readable by its owner only.
        Raises `NoKeyFile` and `UnusableKey`.
        """
        if environment_value is not None:
            return cls(keys_in(environment_value), source="the setting fernet_keys")
        path = home / KEY_FILE_NAME
        try:
            if not path.exists():
                if not makes_file:
                    raise NoKeyFile(path)
                _make_key_file(path)
            state = _state_of(path)  # before: a key that is added meanwhile is noticed later
            return cls(_read_key_file(path), source=str(path), path=path, read_as=state)
        except OSError as error:
            raise _unusable(path, error) from error

    @property
    def fingerprints(self) -> list[str]:
        """The names of the keys: each is derived from its key, and says nothing about it."""
        return list(self._fernets)

    def encrypt(self, data: bytes, fingerprint: str | None = None) -> str:
        """Return ``data`` under the key of this fingerprint, by default the first one, as printable text.

        Raises `WrongKeys` if this machine does not have the key.
        """
        if fingerprint is None:
            fingerprint = self.fingerprints[0]
        self.require(fingerprint)
        return self._fernets[fingerprint].encrypt(data).decode("ascii")

    def require(self, fingerprint: str) -> None:
        """Raise `WrongKeys` unless this machine has the key of this fingerprint."""
        if fingerprint not in self._fernets:
            self.read_again()
        if fingerprint not in self._fernets:
            raise self.wrong_for([fingerprint])

    def decrypt(self, text: str) -> bytes:
        """Return the encrypted data in clear. Raises `BadKey` if no key fits, or if the text was tampered with."""
        return self.decrypt_with_key(text)[0]

    def decrypt_with_key(self, text: str) -> tuple[bytes, str]:
        """Return the encrypted data in clear, and the fingerprint of its key. Raises `BadKey`."""
        found = self._decrypted(text)
        if found is None and self.read_again():
            found = self._decrypted(text)
        if found is None:
            known = "the one key" if len(self._fernets) == 1 else f"any of the {len(self._fernets)} keys"
            raise BadKey(f"the kwargs cannot be decrypted with {known} this supervisor has{self._trouble}")
        return found

    def _decrypted(self, text: str) -> tuple[bytes, str] | None:
        for fingerprint, fernet in self._fernets.items():
            try:
                return fernet.decrypt(text), fingerprint
            except (InvalidToken, ValueError):
                continue
        return None

    def wrong_for(self, needed: Sequence[str]) -> WrongKeys:
        """Return the error that these keys, in which the database is written, are not here."""
        here = ", ".join(self.fingerprints)
        return wrong_keys(needed, f"{self.source} has {here}{self._trouble}")

    def read_again(self) -> bool:
        """Read the key file again if it has changed; return whether it has. A file that cannot be read changes nothing.

        Keys that are no longer in it stay known to this process. What is wrong with a file that cannot be read is said
        with the next key that is missing.
        """
        state = None if self.path is None else _state_of(self.path)
        if self.path is None or state is None or state == self._read_as:
            return False
        try:
            self._fernets = _fernets(_read_key_file(self.path), self.source) | self._fernets
        except OSError as error:
            self._trouble = f"; {_unusable(self.path, error)}"
            return False
        except UnusableKey as error:
            self._trouble = f"; {error}"
            return False
        self._read_as, self._trouble = state, ""
        return True

    def add_key(self) -> str:
        """Put a new key in front of the others in the key file; return its fingerprint. Raises `UnusableKey`.

        The file keeps its owner, as whom a supervisor reads it. Two processes must not do this at once: one of the two
        keys would be lost.
        """
        if self.path is None:
            raise UnusableKey(f"{self.source} cannot be changed from here: put a new key after the others in it")
        key = Fernet.generate_key()
        path = self.path.resolve()
        try:
            old = _read_key_file(path)
            draft = _write_draft(path, b"\n".join([key, *(each.encode() for each in old)]) + b"\n")
            _give_to_owner(draft, path)
            draft.rename(path)
            _sync_folder(path.parent)
        except OSError as error:
            raise _unusable(path, error) from error
        self.read_again()
        return fingerprint_of(key)


def keys_in(setting: str) -> list[str]:
    """Return the keys of the setting ``fernet_keys``: separated by commas, or in lines, as a key file has them."""
    return setting.replace(",", " ").split()


def fingerprint_of(key: str | bytes) -> str:
    """Return the name of a Fernet key: the beginning of a MAC under the key, from which it cannot be computed.

    A key has 256 random bits, so it cannot be guessed and compared either.
    """
    raw = base64.urlsafe_b64decode(key)
    return hmac.digest(raw, b"headgate: fingerprint of a key", "sha256").hex()[:FINGERPRINT_CHARS]


def wrong_keys(needed: Sequence[str], here: str) -> WrongKeys:
    """Return the error that the keys of the database are not on this machine; ``here`` says what is."""
    keys = f"the key {needed[0]}" if len(needed) == 1 else f"the keys {', '.join(needed)}"
    return WrongKeys(
        f"this database is written with {keys}; {here}: copy the key file of the machine that made it, "
        f"or set HEADGATE_FERNET_KEYS"
    )


def _fernets(keys: Sequence[str], source: str) -> dict[str, Fernet]:
    if not keys:
        raise UnusableKey(f"there is no encryption key in {source}")
    fernets = {}
    for number, key in enumerate(keys, start=1):
        try:
            fernet = Fernet(key)
        except ValueError:
            # The library's error is dropped, because its text may show the key.
            raise UnusableKey(
                f"key {number} of {len(keys)} in {source} is malformed: "
                f"a key is 32 bytes in url-safe base64, 44 characters"
            ) from None
        fernets[fingerprint_of(key)] = fernet
    return fernets


def _unusable(path: Path, error: OSError) -> UnusableKey:
    return UnusableKey(f"the key file {path} cannot be used: {error.strerror or error}")


def _state_of(path: Path) -> tuple[int, ...] | None:
    """Return what changes if the file does; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _make_key_file(path: Path) -> None:
    """Create the file atomically, so that two processes that try at once both use the same complete file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = _write_draft(path, Fernet.generate_key() + b"\n")
    try:
        os.link(draft, path)
    except FileExistsError:
        return  # another process was first, and its key is used
    finally:
        draft.unlink()
    _sync_folder(path.parent)


def _write_draft(path: Path, content: bytes) -> Path:
    """Write a file beside ``path``, durably, readable by its owner only; return its path."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        draft.unlink()  # a part of a key is of no use, and should not lie about
        raise
    return draft


def _give_to_owner(draft: Path, path: Path) -> None:
    """Give a draft to the owner of the file that it is to replace. Raises `UnusableKey`, and then it is gone."""
    owner, own = path.stat(), draft.stat()
    try:
        if (owner.st_uid, owner.st_gid) != (own.st_uid, own.st_gid):
            os.chown(draft, owner.st_uid, owner.st_gid)
    except OSError:
        draft.unlink()
        raise UnusableKey(f"the key file {path} belongs to {_name_of(owner.st_uid)}: change it as that user") from None


def _name_of(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"


def _sync_folder(path: Path) -> None:
    """Make a new name durable: without the file, nothing that is encrypted from now on could be read."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


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
