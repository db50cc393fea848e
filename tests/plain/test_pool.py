"""The queue of measuring devices, alone: a farm of a hundred simulated ones, and devices that are lost."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from tvmfuse.errors import DeviceLost
from tvmfuse.measure.pool import Pool

WAIT_S = 30.0  # real seconds, after which a queue that lets a device idle has hung the simulation


class SimulatedTime:
    """Seconds that pass once every device that could be busy is: then the first one to finish does. No real time is looked at."""

    def __init__(self, devices: int, jobs: int) -> None:
        self.now, self._devices, self._jobs = 0.0, devices, jobs
        self._ends: list[float] = []
        self._changed = threading.Condition()

    def work(self, seconds: float) -> None:
        """One job: takes that long, and its device."""
        with self._changed:
            end = self.now + seconds
            self._ends.append(end)
            while True:
                if len(self._ends) == min(self._devices, self._jobs):
                    self.now = min(self._ends)
                    self._changed.notify_all()
                if self.now >= end:
                    break
                assert self._changed.wait(WAIT_S), "a device is idle while jobs wait"
            self._ends.remove(end)
            self._jobs -= 1
            self._changed.notify_all()


def test_a_hundred_devices_do_nearly_a_hundred_times_the_work_of_one() -> None:
    """Of the queue alone: nothing is compiled, sent or measured."""
    rng = random.Random(1)
    jobs = [rng.uniform(0.5, 1.5) for _ in range(2000)]
    time = SimulatedTime(100, len(jobs))
    done: Counter[int] = Counter()

    def job(device: int, seconds: float) -> float:
        time.work(seconds)
        done[device] += 1
        return seconds

    assert Pool(range(100)).map(job, jobs) == jobs
    assert time.now < 1.1 * sum(jobs) / 100
    assert len(done) == 100 and min(done.values()) > 10


def test_a_lost_device_costs_its_job_one_retry_elsewhere() -> None:
    pool, tried = Pool(["sound", "dying"]), Counter[int]()
    both = threading.Barrier(2)

    def job(device: str, item: int) -> str:
        tried[item] += 1
        if sum(tried.values()) <= 2:
            both.wait(WAIT_S)
        if device == "dying":
            raise DeviceLost("unplugged")
        return device

    assert pool.map(job, range(10)) == ["sound"] * 10
    assert sorted(tried.values()) == [1] * 9 + [2]
    assert len(pool) == 1 and [(place, str(loss)) for place, loss in pool.lost] == [("dying", "unplugged")]


def test_a_job_that_costs_two_devices_ends_it() -> None:
    pool = Pool(range(5))
    with pytest.raises(DeviceLost, match="unplugged"):
        pool.map(lambda device, item: lose(), [0])
    assert len(pool) == 3


def test_no_device_left_is_an_error_for_everybody_who_waits() -> None:
    pool = Pool(["only"])
    with pytest.raises(DeviceLost, match="no measuring device is left: unplugged"):
        pool.map(lambda device, item: lose(), [0, 1])
    with pytest.raises(DeviceLost, match="no measuring device is left"), pool.lease():
        pass


def test_an_error_of_a_job_is_the_callers_and_keeps_the_device() -> None:
    pool = Pool([1, 2])
    with pytest.raises(ZeroDivisionError):
        pool.map(lambda device, item: 1 / item, [1, 0, 1])
    assert len(pool) == 2
    assert pool.map(lambda device, item: item, []) == []


def test_a_device_has_one_job_at_a_time() -> None:
    pool, busy, most = Pool(range(3)), Counter[int](), []

    def job(device: int, item: int) -> None:
        busy[device] += 1
        most.append(busy[device])
        busy[device] -= 1

    pool.map(job, range(300))
    assert max(most) == 1


def lose() -> None:
    raise DeviceLost("unplugged")
