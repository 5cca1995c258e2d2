"""What a real worker is told stays out of all it writes: records, output, the outcome, the last words of one killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.supervisor.executors.workers_harness import Author, Pool, closing

from headgate.protocol.messages.queries import GetConnection, GetVariable, Response
from headgate.protocol.messages.steps import StepFailed, StepSucceeded
from headgate.store.store import Store
from headgate.supervisor.children.process import ChildProcess, scrub, start_worker
from headgate.supervisor.executors.base import StepLost
from headgate.supervisor.queries import StoreQueries

SECRETS = ("tok-0123456789", "hunter/22", "hunter%2F22")
URI = "pg://me:hunter%2F22@h"


@pytest.fixture
def answers(store: Store) -> StoreQueries:
    store.tasks.connections.put("db", URI.encode())
    return StoreQueries(store, {"HEADGATE_VAR_TOKEN": SECRETS[0]})


@pytest.fixture
def pool(tmp_path: Path, answers: StoreQueries) -> Iterator[Pool]:
    def spawn() -> ChildProcess:
        return start_worker(environment=scrub(os.environ, passed=(), secrets=()), hide=answers.secrets.hide_in_bytes)

    with closing(Pool(tmp_path, spawn=spawn)) as pool:
        yield pool


@pytest.fixture
def author(tmp_path: Path) -> Author:
    return Author(tmp_path)


def run(pool: Pool, author: Author, answers: StoreQueries, ending: str) -> Any:
    """Run a step that reads two secrets, writes them wherever it can, and ends so."""
    step = author.step(
        f"""
        def f(context):
            token, uri = Variable.get("token"), Connection.get("db").uri
            password = Connection.get("db").password
            structlog.get_logger("mine").warning("told", token=token, nested={{"p": [password]}})
            logging.getLogger("theirs").warning("%s", Connection.get("db"))
            print("printed", token, password, flush=True)
            sys.stdout.buffer.write(("x" * 20_000 + token).encode() + b"\\n")
            os.write(2, f"written {{token}} {{uri}}\\n".encode())
            {ending}
        """
    )
    pool.until(pool.executor.room, "room for a step")
    pool.executor.submit(step)
    answered = 0
    while pool.ended(step.token) is None:
        pool.turn(1.0)
        for asked in pool.asked()[answered:]:
            assert isinstance(asked.query, GetVariable | GetConnection)
            pool.executor.answer(step.token, Response(asked.id, answers.answer(asked.query, dag_run_id=None)))
            answered += 1
    return pool.wait_end(step)


def written(pool: Pool) -> str:
    return "\n".join([*map(str, pool.records), *(line for _, line in pool.output)])


def assert_no_secret_in(text: str) -> None:
    assert [secret for secret in SECRETS if secret in text] == []


def test_what_a_step_writes(pool: Pool, author: Author, answers: StoreQueries) -> None:
    assert isinstance(run(pool, author, answers, "return len(token)"), StepSucceeded)
    pool.until(lambda: pool.output, "the line that went past Python")
    (told,) = pool.logged("told")
    assert (told["token"], told["nested"]) == ("***", {"p": ["***"]})
    assert "printed *** ***" in pool.lines()
    text = written(pool)
    assert "written *** ***" in text
    assert_no_secret_in(text)


def test_what_a_step_fails_with(pool: Pool, author: Author, answers: StoreQueries) -> None:
    outcome = run(pool, author, answers, "raise ValueError(token + uri)")
    assert isinstance(outcome, StepFailed)
    assert outcome.error.startswith("ValueError: ******")
    assert_no_secret_in(str(outcome))


def test_the_last_words_of_a_worker_that_dies(pool: Pool, author: Author, answers: StoreQueries) -> None:
    lost = run(pool, author, answers, "os._exit(3)")
    assert isinstance(lost, StepLost)
    assert "written *** ***" in lost.reason
    assert_no_secret_in(lost.reason)
