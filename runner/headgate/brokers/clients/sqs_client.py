"""Connections to SQS from stored ones, and what the errors of AWS mean to a producer.

``sqs://ACCESS_KEY:SECRET@/?region=eu-west-1``; without a key and a secret those that AWS's own clients find
(environment, files, the role of the machine). A host and a port name an endpoint other than that of the region, and
``sqs+http://`` one without TLS. In the query: ``region``, ``profile`` (of AWS's files), ``session_token``, and
``ssl_ca_certs``, ``ssl_certfile`` and ``ssl_keyfile`` of `headgate.brokers.clients.connecting`.

The client makes no attempt of its own to repeat a call: what a repeated receive whose first answer was lost has taken
would be nobody's until its visibility is over.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from headgate.brokers.broker_errors import BrokerError, BrokerMisconfigured, BrokerSourceMissing
from headgate.brokers.clients.connecting import certificate_error, check_connection, tls_files
from headgate.triggers.named_values import Connection

try:
    from botocore import exceptions
    from botocore.config import Config
    from botocore.parsers import ResponseParserError
    from botocore.session import Session
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "SQS needs the client botocore: pip install 'headgate[sqs]'", name="botocore"
    ) from missing

SCHEMES: Final = {"sqs+http": False, "sqs": True}
OPTIONS: Final = ("region", "profile", "session_token")
TIMEOUT_S: Final = 5.0  # to connect, and for one answer, beside the wait of a receive
RECEIVE_S_MAX: Final = 10  # this wait: each costs money, and one that is abandoned may take messages
CALLS_MAX: Final = 4  # at the same moment, beside those that receive
BATCH_MAX: Final = 10  # messages of one call
TROUBLE: Final = (
    exceptions.ConnectionError,
    exceptions.HTTPClientError,
    exceptions.CredentialRetrievalError,
    ResponseParserError,
    OSError,
)
_REFUSALS: Final = frozenset(
    {
        *("AccessDenied", "AccessDeniedException", "IncompleteSignature", "InvalidAccessKeyId", "InvalidClientTokenId"),
        *("InvalidSecurity", "KmsAccessDenied", "MissingAuthenticationToken", "NotAuthorized", "OptInRequired"),
        *("SignatureDoesNotMatch", "UnrecognizedClientException"),
    }
)
_MISSING: Final = ("NonExistentQueue", "QueueDoesNotExist", "QueueDeletedRecently")
_PASSING: Final = ("Throttl", "OverLimit", "Expired", "InternalError", "InternalFailure", "ServiceUnavailable")
_REPEATED: Final = "The Canonical String"

Call = Callable[[], Any]


class SqsPasses(ConnectionError):
    """SQS refuses a call for now; among `TROUBLE`."""


class SqsClient:
    """A client of one region or endpoint. Its calls may be made in several threads."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        with translated(name):
            self._client = _made(connection)
        self._calls = Workers(CALLS_MAX)

    def call(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer to one call. Raises what `translated` raises."""
        with translated(self.name):
            answer: dict[str, Any] = getattr(self._client, operation)(**arguments)
            return answer

    def call_all(self, operation: str, calls: Sequence[Mapping[str, Any]], *, in_order: bool) -> list[dict[str, Any]]:
        """Return the answers to several calls, one after the other if ``in_order``, else `CALLS_MAX` at a time.

        Raises for the first that fails.
        """
        if in_order or len(calls) == 1:
            return [self.call(operation, **call) for call in calls]
        futures = [self._calls.start(partial(self.call, operation, **call)) for call in calls]
        return [future.result() for future in futures]

    def close(self) -> None:
        """Close the connections."""
        self._calls.close()
        self._client.close()


class Workers:
    """Threads that make calls, begun when they are needed. A call that hangs keeps no process alive."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._count = 0
        self._waiting: queue.SimpleQueue[tuple[Call, Future[Any]] | None] = queue.SimpleQueue()

    def start(self, call: Call) -> Future[Any]:
        """Make a call as soon as a thread is free; return its future. Used by one thread."""
        future: Future[Any] = Future()
        self._waiting.put((call, future))
        if self._count < self._count_max:
            self._count += 1
            threading.Thread(target=self._work, name="headgate sqs", daemon=True).start()
        return future

    def close(self) -> None:
        """Have the threads end when their calls have."""
        for _ in range(self._count):
            self._waiting.put(None)

    def _work(self) -> None:
        while (given := self._waiting.get()) is not None:
            call, future = given
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del given, call, future  # an error holds a traceback, and with it all that it has seen


@contextmanager
def translated(name: str) -> Generator[None]:
    """Raise what the client raises as `BrokerMisconfigured` or `BrokerError`, if trying again would not help."""
    try:
        yield
    except exceptions.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        # After that word AWS repeats the head of a request whose signature is wrong, with its session token.
        text = f"{code}: {str(error.response.get('Error', {}).get('Message', '')).partition(_REPEATED)[0].rstrip()}"
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if any(each in code for each in _PASSING) or status >= 500:
            raise SqsPasses(text) from None
        if any(each in code for each in _MISSING):
            raise BrokerSourceMissing(f"{name}: the queue does not exist (any more): {text}") from None
        if code in _REFUSALS or status in (401, 403):
            raise BrokerMisconfigured(f"{name}: AWS refuses access: {text}") from None
        raise BrokerError(f"{name}: {text}") from None
    except exceptions.NoRegionError:
        raise BrokerMisconfigured(f"{name}: no region is known: give ?region=... in the connection") from None
    except (exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.ProfileNotFound) as error:
        raise BrokerMisconfigured(f"{name}: {error}; the runner sees AWS_* variables if pass_env names them") from None
    except (exceptions.ParamValidationError, exceptions.InvalidRegionError, exceptions.EndpointProviderError) as error:
        raise BrokerMisconfigured(f"{name}: {error}") from None
    except (exceptions.ConnectionError, exceptions.HTTPClientError) as error:
        if (refusal := certificate_error(error)) is not None:
            raise BrokerMisconfigured(f"{name}: {refusal}") from None
        raise


def _made(connection: Connection) -> Any:
    where = f"the connection {connection.name!r}"
    check_connection(connection, SCHEMES, OPTIONS)
    if "ssl_check_hostname" in connection.extra:
        raise BrokerMisconfigured(f"{where}: the name of the host is always checked: leave out ssl_check_hostname")
    if connection.schema:
        raise BrokerMisconfigured(f"{where} must have no path: the queue is an argument")
    if len(connection.hosts) > 1:
        raise BrokerMisconfigured(f"{where} must name one host at most")
    if bool(connection.login) != bool(connection.password):
        raise BrokerMisconfigured(f"{where} must have an access key and its secret, or neither")
    if "session_token" in connection.extra and not connection.password:
        raise BrokerMisconfigured(f"{where} has a session_token, and no access key that it belongs to")
    if connection.login and "profile" in connection.extra:
        raise BrokerMisconfigured(f"{where} has an access key and a profile, and must have one of them")
    files = tls_files(connection)
    host = f"[{connection.host}]" if ":" in connection.host else connection.host
    port = f":{connection.port}" if connection.port else ""
    session = Session(profile=connection.extra.get("profile"))
    if connection.login:
        # Not as arguments of the client: a traceback that shows local variables would show a secret.
        session.set_credentials(connection.login, connection.password, connection.extra.get("session_token"))
    certificate = files.get("ssl_certfile")
    config = Config(
        connect_timeout=TIMEOUT_S,
        read_timeout=TIMEOUT_S + RECEIVE_S_MAX,
        retries={"total_max_attempts": 1},
        max_pool_connections=2 * CALLS_MAX,
        tcp_keepalive=True,
        client_cert=(certificate, files["ssl_keyfile"]) if certificate and "ssl_keyfile" in files else certificate,
    )
    return session.create_client(
        "sqs",
        region_name=connection.extra.get("region"),
        endpoint_url=f"{'https' if SCHEMES[connection.scheme] else 'http'}://{host}{port}" if host else None,
        verify=files.get("ssl_ca_certs"),
        config=config,
    )
