"""The simulated database tells a supervisor of what others write, and not of its own writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.proof.simulation import database
from tests.proof.simulation.database import FailingStore
from tests.proof.simulation.world import Weather
from tests.store.harness import QUEUES


async def test_a_supervisor_hears_of_the_writes_of_others_alone() -> None:
    database.reset(["a"])
    world: Any = SimpleNamespace(weather=Weather(), note=lambda _: None, look_at_owners=lambda: None)
    supervisor: Any = SimpleNamespace(is_cut_off=False)
    one, other = FailingStore(world, supervisor), FailingStore(world, supervisor)
    assert one.has_changes(), "it has not looked yet"
    assert not one.has_changes()
    of_process = {"hostname": "h", "pid": 1, "machine": "m", "process_started": 0.0, "capacity": 1, "queues": QUEUES}
    epoch = one.register_triggerer(**of_process)
    assert not one.has_changes()
    other.heartbeat(other.register_triggerer(**of_process | {"pid": 2}))
    assert one.has_changes()
    one.heartbeat(epoch)
    assert not one.has_changes()
