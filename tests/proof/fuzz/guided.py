"""One target, fuzzed by atheris, which follows the branches of headgate's own code; ends this process.

``python -m tests.proof.fuzz.guided --target NAME --minutes N --seed N``, which ``python -m tests.proof.fuzz`` runs for
each target.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import tempfile
import time
from pathlib import Path

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
import structlog

# Only what is imported in here is followed: libraries have fuzzers of their own, and would slow it down a lot.
with contextlib.redirect_stderr(io.StringIO()), atheris.instrument_imports(include=["headgate"]):
    from tests.proof.fuzz.fuzz_inputs import seeds
    from tests.proof.fuzz.fuzz_targets import HANG_S, TARGETS

INPUT_BYTES_MAX = 64 * 1024  # as long as the longest frame of the fuzzed links


def main() -> None:
    """Fuzz until the time is over; a broken promise ends it with a traceback and the input in a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=sorted(TARGETS), required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    target = TARGETS[given.target]

    def try_one(data: bytes) -> None:
        target(data)

    # What libFuzzer finds stays in its corpus until the end of the process, which is abrupt: no context manager.
    corpus = Path(tempfile.mkdtemp(prefix=f"headgate-corpus-{given.target}-"))
    for number, first in enumerate(seeds(given.target)):
        (corpus / str(number)).write_bytes(first.data())
    found = Path(tempfile.gettempdir()) / f"fuzz-{given.target}-{time.time_ns()}-"
    print(f"{given.target}: an input that breaks a promise is written to {found}*; repeat it with")
    print(f"    python -m tests.proof.fuzz --target {given.target} --input FILE", flush=True)
    limits = [f"-max_total_time={max(1.0, 60 * given.minutes):.0f}", f"-timeout={HANG_S:.0f}"]
    limits += [f"-seed={given.seed or 1}", f"-max_len={INPUT_BYTES_MAX}", f"-artifact_prefix={found}"]
    limits += ["-print_final_stats=1", "-verbosity=0"]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
