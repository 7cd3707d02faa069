"""Where a conversation lives and which P serves it. Pure state, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from ppdbench.core.topology import NodeSpec


class Placement:
    """Homes by equal weight: each new conversation goes to the home with the fewest so far.

    Ties go to the earliest node of the topology, so equal arrivals give equal placements in a
    sweep, in the simulator and in the router. A conversation keeps its home until it is released.
    """

    def __init__(self, homes: Iterable[NodeSpec]) -> None:
        self._homes = tuple(homes)
        self._placed = dict.fromkeys((node.name for node in self._homes), 0)
        self._home_of: dict[str, NodeSpec] = {}

    def __repr__(self) -> str:
        return f"<Placement {self._placed} holding {len(self._home_of)}>"

    def home_of(self, conversation: str) -> NodeSpec:
        """The conversation's home; chosen at the first call."""
        home = self._home_of.get(conversation)
        if home is None:
            home = self._home_of[conversation] = self.place()
        return home

    def place(self, usable: Container[str] | None = None) -> NodeSpec:
        """The home of one more conversation, which the caller remembers; of ``usable`` alone.

        At least one home must be usable.
        """
        homes = self._homes if usable is None else [n for n in self._homes if n.name in usable]
        home = min(homes, key=lambda node: self._placed[node.name])
        fewest = self._placed[home.name]
        for node in self._homes if len(homes) < len(self._homes) else ():
            # A home that is away has no share to make up for when it comes back.
            self._placed[node.name] = max(self._placed[node.name], fewest)
        self._placed[home.name] += 1
        return home

    def release(self, conversation: str) -> None:
        """Forget a conversation that has ended; its share of placements stays counted."""
        self._home_of.pop(conversation, None)


def least_loaded(
    nodes: Iterable[NodeSpec], outstanding: Mapping[str, float] | Callable[[str], float]
) -> NodeSpec:
    """The P with the least outstanding prefill tokens; ties go to the earliest."""
    load = outstanding if callable(outstanding) else outstanding.__getitem__
    return min(nodes, key=lambda node: load(node.name))
