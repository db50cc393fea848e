"""Who measures next: a queue of equal devices, each with one job at a time. It knows neither TVM nor what a job is."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from ..errors import DeviceLost

Place = TypeVar("Place")
Item = TypeVar("Item")
Result = TypeVar("Result")
TRIES = 2  # a job whose device dies is tried once elsewhere: what kills two devices is the job


class Pool(Generic[Place]):
    """Places that are free, handed out in turn. A place that is lost (its job raises DeviceLost) is never handed out again.

    Usable from many threads. `lost` says which were lost, and why.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._free = deque(places)
        self._left = len(places)
        self._changed = threading.Condition()
        self.lost: list[tuple[Place, DeviceLost]] = []

    def __len__(self) -> int:
        """Places that aren't lost."""
        return self._left

    def take(self) -> Place:
        """A place of one's own, waited for, to be given back or reported lost. Raises DeviceLost when none is left."""
        with self._changed:
            self._changed.wait_for(lambda: self._free or not self._left)
            if not self._left:
                raise DeviceLost("no measuring device is left" + (f": {self.lost[-1][1]}" if self.lost else ""))
            return self._free.popleft()

    def give_back(self, place: Place) -> None:
        with self._changed:
            self._free.append(place)
            self._changed.notify_all()

    def lose(self, place: Place, loss: DeviceLost) -> None:
        with self._changed:
            self._left -= 1
            self.lost.append((place, loss))
            self._changed.notify_all()

    @contextlib.contextmanager
    def lease(self) -> Iterator[Place]:
        """A place for one block; lost when that raises DeviceLost."""
        place = self.take()
        try:
            yield place
        except DeviceLost as loss:
            self.lose(place, loss)
            raise
        except BaseException:
            self.give_back(place)
            raise
        self.give_back(place)

    def map(self, job: Callable[[Place, Item], Result], items: Sequence[Item]) -> list[Result]:
        """job(place, item) of every item, in their order, on all places at once; each takes the next item as soon as it is free.

        Raises DeviceLost when no place is left, or when an item has cost two.
        """
        todo = deque((index, TRIES) for index in range(len(items)))
        results: dict[int, Result] = {}

        def work() -> None:
            while todo:
                with contextlib.suppress(_Retried), self.lease() as place:
                    while todo:
                        try:
                            index, tries = todo.popleft()
                        except IndexError:  # another thread was quicker
                            return
                        try:
                            results[index] = job(place, items[index])
                        except DeviceLost as loss:
                            if tries == 1:
                                todo.clear()
                                raise
                            todo.append((index, tries - 1))
                            raise _Retried(str(loss)) from loss
                        except BaseException:
                            todo.clear()  # nobody begins what nobody waits for
                            raise

        threads = max(1, min(len(self), len(items)))
        if threads == 1:
            work()
        else:
            with ThreadPoolExecutor(threads) as executor:
                for done in [executor.submit(work) for _ in range(threads)]:
                    done.result()
        return [results[index] for index in range(len(items))]


class _Retried(DeviceLost):
    """The device is gone, the item waits for another one."""
