"""Finds the module and the source line that an op is called from, by reading Python's stack.

Module hooks would not do: `torch.compile` guards on them and would recompile, and methods other than `__call__` do not
call them.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import os
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType, FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import Module

_CALL: CodeType = Module._wrapped_call_impl.__code__
ENGINE: CodeType = torch.autograd.graph._engine_run_backward.__code__

_ELBOWROOM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_WORKLOADS = os.path.join(_ELBOWROOM, "workloads", "")
_NO_PROGRAM = (
    os.path.join(os.path.dirname(torch.__file__), ""), _ELBOWROOM, contextlib.__file__, "<eval_with_key>", "<frozen "
)  # fmt: skip
"""Prefixes of file names that do not belong to the program."""


class Origin(NamedTuple):
    """Source of an op: `module` and `line`, as in `ir.trace.Op`."""

    module: str | None
    line: str


UNKNOWN = Origin(None, "")


class Site(NamedTuple):
    """A place in the program.

    Attributes:
        origin: the innermost module and the innermost line.
        candidates: paths of the possible modules if there are several; `origin.module` is their common ancestor.
        is_backward: whether this thread runs a backward pass; its callers are not examined.
    """

    origin: Origin
    candidates: Sequence[str]
    is_backward: bool


class _Kind(enum.Enum):
    """Kind of function on the stack."""

    CALLER = enum.auto()  # `Module.__call__`
    RUNNER = enum.auto()  # runs a backward pass
    PROGRAM = enum.auto()
    OTHER = enum.auto()


# Globals, since looking up members of an enum is slow.
_CALLER, _RUNNER, _PROGRAM, _OTHER = _Kind


class _Code(NamedTuple):
    """Facts about a function.

    Attributes:
        code: kept alive, so that its id is not reused.
        file: shortened file name, of the program's functions.
        paths: paths of the modules that have this function as a method.
    """

    code: CodeType
    kind: _Kind
    file: str
    paths: Sequence[str]


_NO_CODE = _Code(_CALL, _OTHER, "", ())


class ModulePaths:
    """Module paths within a model.

    A module that is registered in several places has the path by which it was called.

    Args:
        model: root of the paths.
    """

    def __init__(self, model: Module) -> None:
        self._modules = {id(module): module for module in model.modules()}
        self._names = {id(module): strip_wrappers(name) for name, module in model.named_modules()}
        self._holders: dict[int, list[tuple[int, str]]] = {}
        for module in self._modules.values():
            for name, child in module.named_children():
                self._holders.setdefault(id(child), []).append((id(module), strip_wrappers(name)))
        self._owners = {id(each): (each, find_module_path(name)) for name, each in model.named_parameters()}
        self._methods = self._find_methods()
        self._codes: dict[int, _Code] = {}
        self._lines: dict[tuple[int, int], str] = {}
        self._paths: dict[tuple[int, ...], str] = {}
        self._inner: dict[tuple[str | None, int], tuple[str | None, Sequence[str]]] = {}

    def look(self, frames: Iterable[FrameType]) -> Site:
        """Return the place in the program of a stack, given its frames, innermost first."""
        codes = self._codes
        called: list[int] = []
        line = ""
        method = _NO_CODE
        is_backward = False
        for frame in frames:
            code = frame.f_code
            known = codes.get(id(code)) or self._classify(code)
            kind = known.kind
            if kind is _PROGRAM:
                line = line or self._spell_line(frame, known)
                if method is _NO_CODE and known.paths and not called:
                    method = known
            elif kind is _CALLER:
                module = self._find_called(frame)
                if module is not None:
                    called.append(module)
                elif not called:
                    method = _NO_CODE  # the module has the same class but is not in the model
            elif kind is _RUNNER:
                is_backward = True
                break
        path = self._find_path(tuple(called[::-1])) if called else None
        candidates: Sequence[str] = ()
        if method is not _NO_CODE:
            path, candidates = self._find_inner(path, method)
        return Site(Origin(path, line), candidates, is_backward)

    def find_owner(self, parameter: torch.Tensor) -> str | None:
        """Return the path of the module that owns a parameter; None if it is not a parameter of the model."""
        known, path = self._owners.get(id(parameter), (None, None))
        return path if known is parameter else None

    # -- functions ------------------------------------------------------------------------------------------------

    def _classify(self, code: CodeType) -> _Code:
        file = ""
        paths: Sequence[str] = ()
        if code is _CALL:
            kind = _CALLER
        elif code is ENGINE:
            kind = _RUNNER
        elif code.co_filename.startswith(_NO_PROGRAM) and not code.co_filename.startswith(_WORKLOADS):
            kind = _OTHER
        else:
            kind = _PROGRAM
            file = _shorten(code.co_filename)
            paths = self._methods.get(id(code), ())
        found = self._codes[id(code)] = _Code(code, kind, file, paths)
        return found

    def _find_methods(self) -> dict[int, list[str]]:
        """Return the paths of the modules that have a function as a method, by the id of its code."""
        paths: dict[type, list[str]] = {}
        for key, module in self._modules.items():
            paths.setdefault(type(module), []).append(self._names[key])
        found: dict[int, list[str]] = {}
        for kind, those in paths.items():
            for code in set(_list_methods(kind)):
                found.setdefault(id(code), []).extend(those)
        return found

    def _find_inner(self, path: str | None, method: _Code) -> tuple[str | None, Sequence[str]]:
        """Return the path of the module inside `path` whose method was called without `__call__`, and the
        candidates."""
        key = path, id(method.code)
        found = self._inner.get(key)
        if found is None:
            inside = [each for each in method.paths if path is None or _is_below(each, path)]
            common = functools.reduce(_find_common, inside) if inside else path
            found = self._inner[key] = (common, inside if len(inside) > 1 else ())
        return found

    def _spell_line(self, frame: FrameType, known: _Code) -> str:
        key = (id(known.code), frame.f_lasti)
        found = self._lines.get(key)
        if found is None:
            found = self._lines[key] = f"{known.file}:{frame.f_lineno}"
        return found

    # -- modules --------------------------------------------------------------------------------------------------

    def _find_called(self, frame: FrameType) -> int | None:
        """Return the id of the module whose `__call__` runs in a frame; None if it is not in the model."""
        scope = frame.f_locals
        module: Any = scope.get("self")
        # Up to Python 3.12 the frame keeps this dict, which would keep the module's arguments alive.
        if sys.version_info < (3, 13) and frame.f_trace is None:
            scope.clear()
        if id(module) not in self._modules:
            held = vars(module).get("_modules") if isinstance(module, Module) else None
            module = held.get("_orig_mod") if isinstance(held, dict) else None  # an OptimizedModule
        return id(module) if id(module) in self._modules else None

    def _find_path(self, called: tuple[int, ...]) -> str:
        """Return the path of the innermost of nested module calls, given outermost first."""
        found = self._paths.get(called)
        if found is None:
            found = self._paths[called] = self._name_below(called[:-1], called[-1])
        return found

    def _name_below(self, outer: tuple[int, ...], module: int) -> str:
        for index in range(len(outer) - 1, -1, -1):
            below = self._climb(module, outer[index])
            if below is not None:
                return _join(self._find_path(outer[: index + 1]), below)
        return self._names[module]

    def _climb(self, module: int, ancestor: int) -> str | None:
        """Return the shortest path from `ancestor` down to `module`; None if it is not inside."""
        queue, seen = deque([(module, "")]), {module}
        while queue:
            here, below = queue.popleft()
            if here == ancestor:
                return below
            for holder, name in self._holders.get(here, ()):
                if holder not in seen:
                    seen.add(holder)
                    queue.append((holder, _join(name, below)))
        return None


def strip_wrappers(name: str) -> str:
    """Return the path of a module or parameter without the `_orig_mod` of `torch.compile`."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def find_module_path(name: str) -> str:
    """Return the path of the module that has a parameter or buffer of this name."""
    return strip_wrappers(name.rpartition(".")[0])


def list_stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def list_raised(error: BaseException) -> list[FrameType]:
    """Return the frames of an error's traceback and the callers that it has not passed yet, innermost first."""
    found = []
    trace = error.__traceback__
    while trace is not None:
        found.append(trace.tb_frame)
        trace = trace.tb_next
    return [*found[::-1], *list_stack(found[0].f_back if found else None)]


def get_accumulated(node: Any) -> torch.Tensor | None:
    """Return the parameter of an AccumulateGrad node; None for other nodes."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def _shorten(name: str) -> str:
    """Return a file name relative to its entry of `sys.path` or to the working folder."""
    folders = {os.path.join(each, "") for each in sys.path if isinstance(each, str) and each}
    with contextlib.suppress(OSError):  # it has been removed
        folders.add(os.path.join(os.getcwd(), ""))
    return name[max((len(each) for each in folders if name.startswith(each)), default=0) :]


def _list_methods(kind: type) -> Iterator[CodeType]:
    """Yield the code of the methods of a module class and its bases, except PyTorch's."""
    for each in kind.__mro__:
        if not each.__module__.startswith(("torch.", "builtins")):
            for value in vars(each).values():
                function = value.fget if isinstance(value, property) else value
                while isinstance(function, FunctionType):
                    yield function.__code__
                    function = vars(function).get("__wrapped__")


def _join(path: str, below: str) -> str:
    return f"{path}.{below}" if path and below else path or below


def is_within(path: str, other: str) -> bool:
    """Tell whether a module is another module or inside it."""
    return path == other or _is_below(path, other)


def _is_below(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _find_common(path: str, other: str) -> str:
    """Return the path of the innermost module that contains both."""
    ours, theirs = path.split("."), other.split(".")
    count = next((i for i, (one, two) in enumerate(zip(ours, theirs, strict=False)) if one != two), None)
    return ".".join(ours[: min(len(ours), len(theirs)) if count is None else count])
