"""Regions of a dataflow block that one value leaves: straight-line chains, and small DAGs such as silu's x * sigmoid(x)."""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tvm import relax
from tvm.relax import DataflowBlock, DataflowVar, Expr, Var


@dataclass(frozen=True, eq=False)
class Flow:
    """The bindings of a dataflow block in program order, and who reads them; readers are in program order too."""

    values: Mapping[Var, Expr]
    users: Mapping[Var, Sequence[Var]]

    @staticmethod
    def of(block: DataflowBlock) -> Flow:
        values = {binding.var: binding.value for binding in block.bindings}
        order = {var: at for at, var in enumerate(values)}
        return Flow(values, {var: sorted(users, key=order.__getitem__) for var, users in relax.analysis.udchain(block).items()})

    @functools.cached_property
    def order(self) -> dict[Var, int]:
        return {var: at for at, var in enumerate(self.values)}

    @functools.cached_property
    def _variables(self) -> list[Var]:
        return list(self.values)

    def readers(self, var: Var) -> int:
        """Bindings that read `var`, and one more if the graph returns it."""
        return len(self.users.get(var, ())) + is_output(var)

    def grow(self, entry: Var, admits: Callable[[Var, set[Var]], bool]) -> tuple[list[Var], list[Var]]:
        """The largest region over `entry` that one value leaves, in program order; and what was admitted beyond it.

        Bindings are taken in program order until one isn't admitted. Whenever a single value is left that somebody still has to read,
        that value is a possible exit.

        admits   whether a binding may join a region that holds these values, `entry` among them.
        """
        region, taken, closed = {entry}, [], 0
        unread = {entry: self.readers(entry)}
        queue = [self.order[user] for user in self.users.get(entry, ())]
        while queue:
            var = self._variables[heapq.heappop(queue)]
            if var in region:
                continue
            if not admits(var, region):
                break
            for read in region.intersection(relax.analysis.free_vars(self.values[var])):
                unread[read] -= 1
                if not unread[read]:
                    del unread[read]
            taken.append(var)
            region.add(var)
            unread[var] = self.readers(var)
            if list(unread) == [var]:
                closed = len(taken)
            for user in self.users.get(var, ()):
                heapq.heappush(queue, self.order[user])
        return taken[:closed], taken[closed:]


def is_output(var: Var) -> bool:
    return not isinstance(var, DataflowVar)
