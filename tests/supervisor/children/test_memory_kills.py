"""How many processes the kernel has killed for want of memory, by files of the test."""

from __future__ import annotations

import os
import selectors
import signal
from pathlib import Path

import pytest

from headgate.supervisor.children.memory_kills import MemoryKills, have_risen, memory_kills
from headgate.supervisor.children.process import ChildProcess, start_runner

EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill {}\noom_group_kill 0\n"
VMSTAT = "nr_free_pages 4711\noom_kill {}\nswap_ra 0\n"
WORDS = "killed by SIGKILL for want of memory"
OUR_CGROUP = "12:pids:/elsewhere\n0::/system.slice/headgate.service\n"


class Machine:
    """The files of a machine, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.write(self.proc / "self" / "cgroup", OUR_CGROUP)

    def write(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        return path

    def count(self) -> MemoryKills | None:
        return memory_kills(self.proc, self.cgroups)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_our_cgroup_counts_before_those_above_it_and_the_machine(machine: Machine) -> None:
    assert machine.count() is None
    vmstat = machine.write(machine.proc / "vmstat", VMSTAT.format(7))
    assert machine.count() == (vmstat, 7)
    above = machine.write(machine.cgroups / "system.slice" / "memory.events", EVENTS.format(4))
    assert machine.count() == (above, 4)
    ours = machine.write(machine.cgroups / "system.slice" / "headgate.service" / "memory.events", EVENTS.format(2))
    assert machine.count() == (ours, 2)


def test_a_container_that_sees_its_own_cgroup_as_the_root(machine: Machine) -> None:
    root = machine.write(machine.cgroups / "memory.events", EVENTS.format(1))
    assert machine.count() == (root, 1), "our cgroup is below, by a path of the host that is not here"
    machine.write(machine.proc / "self" / "cgroup", "0::/\n")
    assert machine.count() == (root, 1)


@pytest.mark.parametrize(
    "cgroup", ["", "0::\n", "0::/../other\n", "4:memory:/other\n", "0::/a\0b\n", "\udcff", "0::/\udcff\n"]
)
def test_without_a_cgroup_the_machine_counts(machine: Machine, cgroup: str) -> None:
    machine.write(machine.proc / "self" / "cgroup", cgroup)
    for beside in (machine.cgroups.parent, machine.cgroups):
        machine.write(beside / "other" / "memory.events", EVENTS.format(4))
    vmstat = machine.write(machine.proc / "vmstat", VMSTAT.format(0))
    assert machine.count() == (vmstat, 0)


@pytest.mark.parametrize(
    "content", ["", "oom_kill", "oom_kill \n", "oom_kill x\n", "oom_kill -1\n", "oom_kill ²\n", "\udcff"]
)
def test_odd_content_counts_nothing(machine: Machine, content: str) -> None:
    machine.write(machine.proc / "vmstat", content)
    machine.write(machine.cgroups / "memory.events", content)
    assert machine.count() is None


def test_a_file_that_cannot_be_read_counts_nothing(machine: Machine) -> None:
    (machine.proc / "vmstat").mkdir()
    assert machine.count() is None


def test_the_files_of_this_machine_can_be_read() -> None:
    found = memory_kills()
    assert found is None or found.kills >= 0


def test_only_a_higher_count_of_the_same_file_is_a_kill() -> None:
    ours, machine = Path("memory.events"), Path("vmstat")
    assert have_risen(MemoryKills(ours, 1), MemoryKills(ours, 2))
    assert not have_risen(MemoryKills(ours, 1), MemoryKills(ours, 1))
    assert not have_risen(MemoryKills(ours, 2), MemoryKills(ours, 1)), "the cgroup was made anew"
    assert not have_risen(MemoryKills(ours, 1), MemoryKills(machine, 2))
    assert not have_risen(None, MemoryKills(ours, 1))
    assert not have_risen(MemoryKills(ours, 1), None)


def end(folder: Path, counts: list[MemoryKills | None], number: int, *, by_us: bool = False) -> tuple[str, bool]:
    """Have a real process end by a signal while the kernel counts so; return how it ended, and whether by itself."""
    (folder / "goes_on.py").write_text("import time\ntime.sleep(60)\n")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    child = ChildProcess("goes_on", (), environment, count_kills=lambda: counts.pop(0))
    if by_us:
        child.kill("it was silent")
    else:
        os.kill(child.pid, number)
    return ended(child)


def ended(child: ChildProcess) -> tuple[str, bool]:
    with selectors.DefaultSelector() as of_end:
        of_end.register(child.pidfd, selectors.EVENT_READ)
        assert of_end.select(60)
    how, itself = child.reap(), child.ended_itself
    child.close()
    return how, itself


def kills(*counts: int) -> list[MemoryKills | None]:
    return [MemoryKills(Path("memory.events"), count) for count in counts]


def test_a_process_that_is_killed_for_want_of_memory_has_ended_itself(tmp_path: Path) -> None:
    assert end(tmp_path, kills(4, 5), signal.SIGKILL) == (WORDS, True)


def test_the_kills_before_and_after_a_runner_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = kills(4, 5)
    monkeypatch.setattr("headgate.supervisor.children.process.memory_kills", lambda: counts.pop(0))
    child = start_runner(1, environment=os.environ)
    os.kill(child.pid, signal.SIGKILL)
    assert ended(child) == (WORDS, True)


def test_any_other_sigkill_is_from_outside(tmp_path: Path) -> None:
    assert end(tmp_path, kills(4, 4), signal.SIGKILL) == ("killed by SIGKILL", False)
    assert end(tmp_path, [None, *kills(4)], signal.SIGKILL) == ("killed by SIGKILL", False)
    assert end(tmp_path, [*kills(4), None], signal.SIGKILL) == ("killed by SIGKILL", False)


def test_what_the_kernel_counts_does_not_matter_to_other_ends(tmp_path: Path) -> None:
    assert end(tmp_path, kills(4, 5), signal.SIGTERM) == ("killed by SIGTERM", False)
    assert end(tmp_path, kills(4, 5), 0, by_us=True) == ("killed by SIGKILL (we did it: it was silent)", True)
