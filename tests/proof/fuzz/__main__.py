"""Fuzz for as long as one likes: ``python -m tests.proof.fuzz --minutes 10 [--target NAME ...] [--seed N]``.

With atheris installed, one target after the other is fuzzed by it, guided by coverage. Without it, a loop of our
own mutates the frames of the golden captures, and goes on from every input whose outcome was never seen before.
Either way, an input that breaks a promise is written to a file, and the command that repeats it is printed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import logging
import random
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import structlog
from tests.proof.fuzz.fuzz_inputs import Input, mutated, seeds
from tests.proof.fuzz.fuzz_targets import TARGETS, Broken, check

KEPT_MAX = 2_000  # inputs of a target that are mutated further
TURN_S = 2.0  # how long a target is fuzzed before the next has its turn
MEASURED_EVERY = 50  # inputs between two whose memory is measured, which is slow


class Fuzzed:
    """One target, its inputs, and what came of them."""

    def __init__(self, name: str, randomness: random.Random) -> None:
        self.name = name
        self.runs = 0
        self.outcomes: set[str] = set()
        self._randomness = randomness
        self._kept: list[Input] = []
        for seed in seeds(name):
            self._try(seed)
        assert self._kept, f"{name} has no inputs to begin with"

    def fuzz(self, until: float) -> None:
        """Mutate and try until the time has come; raises `Broken`."""
        while time.monotonic() < until:
            one, other = self._randomness.choice(self._kept), self._randomness.choice(self._kept)
            self._try(mutated(one, other, self._randomness))

    def _try(self, tried: Input) -> None:
        outcome = check(self.name, tried.data(), measured=self.runs % MEASURED_EVERY == 0)
        self.runs += 1
        if outcome not in self.outcomes or len(self._kept) < 2:
            self.outcomes.add(outcome)
            if len(self._kept) < KEPT_MAX:
                self._kept.append(tried)


def report(broken: Broken) -> None:
    """Keep the input, and say how to repeat it."""
    path = Path(tempfile.gettempdir()) / f"fuzz-{broken.target}-{hashlib.sha256(broken.data).hexdigest()[:12]}"
    path.write_bytes(broken.data)
    traceback.print_exception(broken.__cause__)
    again = f"python -m tests.proof.fuzz --target {broken.target} --input {path}"
    print(f"\n{broken.target} broke a promise. Repeat it: {again}")


def fuzz_ourselves(names: list[str], minutes: float, seed: int) -> bool:
    """Fuzz the targets in turns; return whether all promises were kept."""
    end = time.monotonic() + 60 * minutes
    print(f"seed {seed}")
    try:
        targets = [Fuzzed(name, random.Random(f"{seed} {name}")) for name in names]
        while time.monotonic() < end:
            for target in targets:
                target.fuzz(min(end, time.monotonic() + TURN_S))
    except Broken as broken:
        report(broken)
        return False
    for target in targets:
        print(f"{target.name:28} {target.runs:>9,} inputs  {len(target.outcomes):>5,} different outcomes  0 broken")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proof.fuzz", description="Fuzz what reads bytes of others.")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long in all")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--input", type=Path, help="try this file once, with one --target")
    parser.add_argument("--no-atheris", action="store_true", help="use our own loop even where atheris is installed")
    given = parser.parse_args()
    names = given.target or list(TARGETS)
    # What a core logs about its inputs is of no use here, and there are thousands of them.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    if given.input is not None:
        print(check(names[0], given.input.read_bytes(), measured=True))
        return 0
    if given.no_atheris or importlib.util.find_spec("atheris") is None:
        return 0 if fuzz_ourselves(names, given.minutes, given.seed) else 1
    # It never gives back the process it runs in, so each target has one of its own.
    share = f"{given.minutes / len(names):.4f}"
    command = [sys.executable, str(Path(__file__).with_name("guided.py")), "--minutes", share]
    codes = [subprocess.call([*command, "--seed", str(given.seed), "--target", name]) for name in names]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
