"""Dispatches the ops of a step to Python objects without an entered dispatch mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.utils._python_dispatch import TorchDispatchMode

from elbowroom.hooks.compiled_regions import hiding_from_guards, may_run_compiled, show_regions
from elbowroom.hooks.dispatch_keys import pass_higher_order_ops
from elbowroom.native import library


@contextlib.contextmanager
def dispatching_ops_to(watcher: TorchDispatchMode) -> Iterator[None]:
    """Have `watcher.__torch_dispatch__` run the ops of this thread and of the backward passes that it begins.

    An entered dispatch mode would do the same, but PyTorch picks other formulas under a mode, which changes results in
    their last bits. A watcher is called below all dispatch modes and tensor subclasses: it sees the plain ops that they
    call. A call of Inductor's code is one op, which `watcher.run_region` runs.
    """
    native = library.load()
    pass_higher_order_ops()
    show_regions()
    with hiding_from_guards() if may_run_compiled() else contextlib.nullcontext():
        native.set_watchers((*native.get_watchers(), watcher))
        try:
            yield
        finally:  # other steps that have begun meanwhile may go on
            native.set_watchers(tuple(each for each in native.get_watchers() if each is not watcher))
