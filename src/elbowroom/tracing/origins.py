"""Origins of ops: modules, and lines of the user's code."""

from __future__ import annotations

import bisect
import sys
import threading

import torch

from elbowroom.hooks.module_paths import UNKNOWN, ModulePaths, Origin, get_accumulated, is_within, list_stack


class OpOrigins:
    """Finds the origin of each op of one step.

    The modules that call the ops of a forward pass are on Python's stack. The ops of a backward pass are called by
    autograd nodes. Nodes have sequence numbers per thread, which lead to the forward op that created the node.

    Args:
        model: of the step, which this thread runs.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._paths = ModulePaths(model)
        self._thread = threading.get_ident()
        # By thread, ascending: a sequence number above all nodes made so far, and the origin of the last of them.
        self._made: dict[int, list[tuple[int, Origin]]] = {self._thread: [(_count_nodes(), UNKNOWN)]}

    def find(self) -> Origin:
        """Return the origin of the op that is being dispatched to the caller's caller."""
        site = self._paths.look(list_stack(sys._getframe(2)))
        node = torch._C._current_autograd_node()
        origin = site.origin
        if node is not None and (origin.module is None or site.candidates):
            made = self._find_made(node, threading.get_ident() if site.is_backward else self._thread)
            module = made.module
            if site.candidates:  # a forward pass rerun in a backward pass: choose by the node's module
                near = (each for each in site.candidates if module is not None and is_within(module, each))
                module = next(near, origin.module)
            origin = Origin(module, origin.line or made.line)
        made_here = self._made.setdefault(threading.get_ident(), [])
        count = _count_nodes()
        if not made_here or count > made_here[-1][0]:
            made_here.append((count, origin))
        return origin

    def close(self) -> None:
        """Let go of the model."""
        self._paths = ModulePaths(torch.nn.Module())

    def _find_made(self, node: torch.autograd.graph.Node, thread: int) -> Origin:
        """Return the origin of a node that was created in a thread."""
        if (parameter := get_accumulated(node)) is not None:
            return Origin(self._paths.find_owner(parameter), "")
        made = self._made.get(thread, [])
        index = bisect.bisect_right(made, node._sequence_nr(), key=lambda each: each[0])
        return made[index][1] if index < len(made) else UNKNOWN


def _count_nodes() -> int:
    """Return the number of nodes that this thread has created."""
    return torch._C._autograd._get_sequence_nr()
