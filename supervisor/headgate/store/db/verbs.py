"""How a verb of the store is declared: one method, one transaction, one docstring.

A verb is a public method of a subclass of `Verbs`. Its decorator says which kind of transaction it runs in, and
replaces the parameter ``tx`` as in the table below. The rest of the signature stays as it is written, for type
checkers too::

    class DeferralVerbs(Verbs):
        @leased
        def begin_due_batches(self, tx: LeasedTx, *, limit: int = TIMED_OUT_MAX) -> list[TaskInstanceId]:
            \"\"\"Have up to ``limit`` tasks handle what waits in their streams; return their ids.\"\"\"
            return task_streams.begin_due_batches(tx, limit)

    store.tasks.begin_due_batches(epoch, limit=100)

==================  ==========================  ==========================================================
`leased`            ``(self, tx: LeasedTx, …)``  writes for a supervisor. Callers pass the epoch first. Its lease
                                                is locked before the body runs, else `LeaseLost` is raised
`acting`            ``(self, tx: Tx, …)``        changes something for a user, and says so by ``tx.act``
`writing`           ``(self, tx: Tx, …)``        writes for a supervisor without a lease, or for a program
`reading`           ``(self, tx: Tx, …)``        only reads
`single_statement`  ``(self, tx: Tx, …)``        runs exactly one `Prepared` statement, without BEGIN and COMMIT
==================  ==========================  ==========================================================

- Functions below the verbs take ``tx`` first, in place of ``connection, now, secrets, clock, epoch``. If they must not
  run without a lease, they take a `LeasedTx`, and the type checker sees to it. ``tx.now`` costs no statement in a
  leased transaction; in another it reads the database's clock once.
- Verbs run plain SQLAlchemy (``tx.connection.execute``). `Prepared` is for hot paths only: there times go in by
  ``times.bound`` and come out by ``times.read``.
- A verb that users call is `acting`: it says by ``tx.act`` what it does to which object, and is rolled back with
  `headgate.store.access.audit.Unaudited` if it does not. If an act goes over several transactions, each says it again
  with its ``counts``, and they have one row.
- A verb whose changes others wait for calls ``tx.notify()``. One that may affect the tasks or the end of a run calls
  ``tx.mark_run_dirty(run)``; the flags are written right before the commit.
- If a part must run after the commit (marks, caches, decryption), the public method has no decorator, and either
  opens the transaction itself (``with self.database.leased(epoch) as tx:``) or calls a decorated private method.
- A verb that calls another one would begin a second transaction. Call the function below it instead.
- Every verb may be repeated, and must be after `DatabaseAway`, because its commit may or may not have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

from headgate.store.db.transaction import Database, LeasedTx, Tx
from headgate.store.ids import Epoch


class Verbs:
    """Base of the classes of verbs; all of a store's share its one connection."""

    def __init__(self, database: Database) -> None:
        self.database = database


Self = TypeVar("Self", bound=Verbs)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _show_signature(run: Callable[..., Any], verb: Callable[..., Any], *instead_of_tx: Parameter) -> None:
    """Make ``help()`` and `inspect.signature` show the parameters that callers pass."""
    written = signature(verb)
    this, _, *others = written.parameters.values()
    vars(run)["__signature__"] = written.replace(parameters=[this, *instead_of_tx, *others])


_EPOCH = Parameter("epoch", Parameter.POSITIONAL_OR_KEYWORD, annotation="Epoch")


def leased(
    verb: Callable[Concatenate[Self, LeasedTx, Parameters], Result],
) -> Callable[Concatenate[Self, Epoch, Parameters], Result]:
    """Run a verb in a transaction that writes on behalf of an epoch, with its lease locked."""

    @wraps(verb)
    def run(self: Self, epoch: Epoch, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with self.database.leased(epoch) as tx:
            return verb(self, tx, *args, **kwargs)

    _show_signature(run, verb, _EPOCH)
    return run


def writing(
    verb: Callable[Concatenate[Self, Tx, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """Run a verb in a transaction that writes, without a lease."""

    @wraps(verb)
    def run(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with self.database.writing() as tx:
            return verb(self, tx, *args, **kwargs)

    _show_signature(run, verb)
    return run


def acting(
    verb: Callable[Concatenate[Self, Tx, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """Run a verb in a transaction that writes for a user, and leaves a row in the audit."""

    @wraps(verb)
    def run(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with self.database.acting() as tx:
            return verb(self, tx, *args, **kwargs)

    _show_signature(run, verb)
    return run


def reading(
    verb: Callable[Concatenate[Self, Tx, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """Run a verb in a transaction that only reads."""

    @wraps(verb)
    def run(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with self.database.reading() as tx:
            return verb(self, tx, *args, **kwargs)

    _show_signature(run, verb)
    return run


def single_statement(
    verb: Callable[Concatenate[Self, Tx, Parameters], Result],
) -> Callable[Concatenate[Self, Parameters], Result]:
    """Run a verb that is one `Prepared` statement, which commits by itself."""

    @wraps(verb)
    def run(self: Self, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with self.database.single_statement() as tx:
            return verb(self, tx, *args, **kwargs)

    _show_signature(run, verb)
    return run
