"""Has objects in Python run the ops of a step, without PyTorch noticing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.native import library


@contextlib.contextmanager
def watching(watcher: TorchDispatchMode) -> Iterator[None]:
    """Have `watcher.__torch_dispatch__` run the ops of this thread, and of backward passes that it begins.

    An entered dispatch mode would do the same, but PyTorch picks other formulas while there is one, which changes
    results in their last bits. A watcher is called below all dispatch modes and tensor subclasses, whose ops it sees as
    the plain ones that they call. Compiled models run eagerly meanwhile: what compiled code writes cannot be seen.
    """
    native = library.load()
    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        before = native.get_watchers()
        native.set_watchers((*before, watcher))
        stack.callback(native.set_watchers, before)
        yield
