"""Rules on the tree itself: sizes, names, docstrings, dependencies, and what an import brings with it. No torch."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator

import pytest

import elbowroom

ROOT = pathlib.Path(__file__).parents[1]
SOURCE = ROOT / "src"
MODULES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}

MOST_LINES_A_FILE = 400
MOST_LINES_A_FUNCTION = 60
MOST_STATEMENTS_A_FILE = 300
MOST_STATEMENTS_A_FUNCTION = 50
MOST_PACKED = 6  # assignments that `is_packed` finds in all of src: lower it when it falls, never raise it
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
TEXT_SUFFIXES = {"", ".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".html", ".css", ".js", ".cfg", ".sh"}
SKIPPED = {".git", ".venv", "build", "dist", "__pycache__"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT))


def list_faults(find: Callable[[pathlib.Path], Iterable[str]]) -> dict[str, list[str]]:
    """What a function finds in the modules, by the name of the file."""
    return {name_of(path): found for path in MODULES if (found := list(find(path)))}


def texts() -> Iterator[pathlib.Path]:
    """Every text file a clone would have, and those about to be added."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        found = [ROOT / each for each in listed.stdout.split("\0") if each]
    else:  # not a clone
        found = [path for path in ROOT.rglob("*") if not SKIPPED & set(path.relative_to(ROOT).parts)]
    yield from (path for path in found if path.is_file() and path.suffix in TEXT_SUFFIXES)


def test_there_is_something_to_look_at() -> None:
    assert len(MODULES) > 50


def count_statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) for node in ast.walk(tree))


def find_large(path: pathlib.Path) -> Iterator[str]:
    """What is too large in a file: what in it is a noun of its own?"""
    if (lines := len(path.read_text().splitlines())) > MOST_LINES_A_FILE:
        yield f"{lines} lines"
    if (statements := count_statements(TREES[path])) > MOST_STATEMENTS_A_FILE:
        yield f"{statements} statements"
    for node in ast.walk(TREES[path]):
        if isinstance(node, Function):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_LINES_A_FUNCTION:
                yield f"{node.name} has {length} lines"
            if (statements := count_statements(node) - 1) > MOST_STATEMENTS_A_FUNCTION:
                yield f"{node.name} has {statements} statements"


def test_files_and_functions_stay_small() -> None:
    assert list_faults(find_large) == {}


def is_packed(node: ast.AST) -> bool:
    """Whether this is `a, b, c = x, y, z`: three statements or more in one line."""
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        and len(target.elts) == len(node.value.elts) >= 3
        for target in node.targets
    )


def test_a_line_has_one_statement() -> None:
    assert is_packed(ast.parse("self.a, self.b, self.c = x, y, z").body[0])
    assert not is_packed(ast.parse("a, b = b, a").body[0])
    packed = [
        f"{name_of(path)}:{node.lineno}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and is_packed(node)
    ]
    assert len(packed) <= MOST_PACKED, f"{len(packed)}, one of them new: " + ", ".join(packed)


def is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


PROMISED = {
    inner.name
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef) and is_protocol(node)
    for inner in node.body
    if isinstance(inner, Function) and ast.get_docstring(inner)
}
"""Methods of protocols: what keeps such a promise need not repeat it."""


def missing_docstrings(path: pathlib.Path) -> list[str]:
    """Public classes, functions and methods without one; what overrides a documented method may go without."""
    tree = TREES[path]
    missing = [] if ast.get_docstring(tree) else ["the module"]
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            missing.append(node.name)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and not node.bases:
            missing += [
                f"{node.name}.{inner.name}"
                for inner in node.body
                if isinstance(inner, Function)
                and not inner.name.startswith("_")
                and inner.name not in PROMISED
                and not ast.get_docstring(inner)
            ]
    return missing


def test_every_module_and_public_name_says_what_it_is() -> None:
    assert list_faults(missing_docstrings) == {}


def test_tests_say_what_they_test() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), name_of(path)


def test_slow_tests_exist() -> None:
    for line in (ROOT / "tests" / "slow_tests.txt").read_text().splitlines():
        path, _, test = line.partition("::")
        assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), line


def test_names_say_what_is_inside() -> None:
    for path in MODULES:
        assert not FORBIDDEN_NAMES & {part.lower() for part in path.with_suffix("").relative_to(SOURCE).parts}
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ClassDef):
                words = set(re.sub(r"([a-z])([A-Z])", r"\1_\2", node.name).lower().split("_"))
                assert not FORBIDDEN_NAMES & words, f"{name_of(path)}: {node.name}"


def test_no_package_shares_its_name_with_a_verb() -> None:
    packages = {path.parent.name for path in MODULES if path.name == "__init__.py"}
    for path in MODULES:
        public = {node.name for node in TREES[path].body if isinstance(node, Function) and node.name[0] != "_"}
        assert not packages & public, name_of(path)


def test_no_page_has_a_placeholder() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")]
    assert len(pages) > 20
    assert not [(page.name, found) for page in pages for found in re.findall(r"@[A-Z_]+@|TODO|FIXME", page.read_text())]


def test_nothing_names_this_machine() -> None:
    """A path that exists on one machine only, or a host that others cannot reach, breaks every fresh clone."""
    absolute = r"(?<![\w.])/(work|root|home|Users|opt)/[\w.-]+"
    index = r"(--|^)(extra-)?index-url|--find-links|--trusted-host|--extra-index"
    for path in texts():
        if path == pathlib.Path(__file__):
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
            assert not re.search(f"{absolute}|{index}", line), f"{name_of(path)}:{number}: {line.strip()[:120]}"


# -- structure --------------------------------------------------------------------------------------------------------

MOST_MEMBERS = 35
"""Attributes and methods of one class."""

ENTRY_POINTS = {"Policy", "ElbowroomCallback"}
"""Class names that several modules have: members of a family, integrations with frameworks."""

POOR_OPENINGS = re.compile(r"^(What|The same|Of|As|Who|Whoever|Whether|How|That|All that|Those|Nothing)\b")


def find_circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one file (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            component = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(component) > 1:
                circles.append(sorted(component))

    for name in sorted(imports):
        if name not in order:
            visit(name)
    return circles


def list_python_imports() -> dict[str, set[str]]:
    """Return the modules that each module imports anywhere in its file, for type checkers only included."""
    names = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path for path in MODULES
    }
    found: dict[str, set[str]] = {}
    for name, path in names.items():
        wanted = set()
        for node in ast.walk(TREES[path]):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted |= {f"{node.module}.{each.name}" for each in node.names} | {node.module}
            elif isinstance(node, ast.Import):
                wanted |= {each.name for each in node.names}
        found[name] = {each for each in wanted if each in names and not names[each].match("__init__.py")} - {name}
    return found


def list_native_includes() -> dict[str, set[str]]:
    """Return the files of ours that each C and C++ file includes."""
    files = [path for path in SOURCE.rglob("*") if path.suffix in {".h", ".c", ".cpp"}]
    texts = {path.name: path.read_text() for path in files}
    assert len(texts) == len(files) > 20
    return {
        name: {each for each in re.findall(r'#include "([\w.]+)"', text) if each in texts} - {name}
        for name, text in texts.items()
    }


@pytest.mark.parametrize("list_imports", [list_python_imports, list_native_includes])
def test_no_files_import_each_other_in_a_circle(list_imports: Callable[[], dict[str, set[str]]]) -> None:
    imports = list_imports()
    assert sum(map(len, imports.values())) > 30
    assert find_circles(imports) == []
    first = next(name for name, others in sorted(imports.items()) if others)
    other = min(imports[first])
    assert find_circles({**imports, other: imports[other] | {first}}) != []


def count_members(node: ast.ClassDef) -> int:
    """Count the methods of a class, its declared fields, and the attributes that its methods set."""
    names = {each.name for each in node.body if isinstance(each, Function)}
    names |= {
        each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name):
            names |= {each.attr} if each.value.id == "self" else set()
    return len(names)


def list_classes() -> Iterator[tuple[pathlib.Path, ast.ClassDef]]:
    for path, tree in TREES.items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_classes_stay_small() -> None:
    large = {node.name: count for _, node in list_classes() if (count := count_members(node)) > MOST_MEMBERS}
    assert large == {}


def test_a_class_name_stands_for_one_class() -> None:
    places: dict[str, list[str]] = {}
    for path, node in list_classes():
        if not node.name.startswith("_") and node.name not in ENTRY_POINTS:
            places.setdefault(node.name, []).append(name_of(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def find_poor_openings(path: pathlib.Path) -> list[str]:
    documented = (ast.Module, ast.ClassDef, *Function.__args__)
    found = [ast.get_docstring(node) or "" for node in ast.walk(TREES[path]) if isinstance(node, documented)]
    return [each.partition("\n")[0] for each in found if POOR_OPENINGS.match(each)]


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    assert list_faults(find_poor_openings) == {}


# -- loops in machine code --------------------------------------------------------------------------------------------

IN_MACHINE_CODE = {"compiled", "internal", "inlined"}


def decorations(node: ast.AST) -> set[str]:
    if not isinstance(node, Function):
        return set()
    return {each.id for each in node.decorator_list if isinstance(each, ast.Name)}


def find_outside(node: ast.AST, names: set[str]) -> Iterator[str]:
    """Where any of these names is used outside of machine code."""
    for child in ast.iter_child_nodes(node):
        if decorations(child) & IN_MACHINE_CODE:
            continue
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load) and child.id in names:
            yield f"{child.id} in line {child.lineno}"
        yield from find_outside(child, names)


def test_internal_loops_are_called_from_machine_code_alone() -> None:
    """A call from Python would end the process: nothing is made for it, which halves the time that compiling takes."""
    internal = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts): {
            node.name for node in tree.body if isinstance(node, Function) and "internal" in decorations(node)
        }
        for path, tree in TREES.items()
    }
    assert sum(map(len, internal.values())) > 50
    everywhere = [*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    for path in everywhere:
        tree = TREES.get(path) or ast.parse(path.read_text())
        names = set(internal.get(".".join(path.with_suffix("").parts[len(SOURCE.parts) :]), ()))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in internal:
                here = {each.name: each.asname or each.name for each in node.names}
                names |= {here[name] for name in internal[node.module] & here.keys()}
        assert list(find_outside(tree, names)) == [], name_of(path)


# -- dependencies -----------------------------------------------------------------------------------------------------


def imported(paths: list[pathlib.Path]) -> set[str]:
    """Names of the top packages that these files import, anywhere in them."""
    found = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names)


def declared(*requirements: str) -> set[str]:
    return {re.match(r"[\w-]+", each)[0].lower() for each in requirements}  # type: ignore[index]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_what_is_imported_is_declared_and_the_other_way_round() -> None:
    needed = declared(*PROJECT["dependencies"])
    extras = declared(
        *(
            each
            for name in ("torch", "models", "pictures", "tuning", "integrations")
            for each in PROJECT["optional-dependencies"][name]
        )
    )
    found = imported(MODULES) - {"elbowroom"}
    assert needed <= found <= needed | extras


def test_everything_declared_is_pinned() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, equals, version = line.partition("==")
            assert (equals, bool(re.fullmatch(r"[0-9][\w.]*", version))) == ("==", True), line
            pins[name.lower()] = version
    extras = PROJECT["optional-dependencies"].values()
    every = declared(*PROJECT["dependencies"], *(each for extra in extras for each in extra))
    assert every - {"elbowroom"} <= pins.keys()


# -- imports ----------------------------------------------------------------------------------------------------------


def loaded_by(statement: str) -> set[str]:
    """The packages that a fresh interpreter has loaded after a statement."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r}); {statement}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stdout.split()}


HEAVY = {"torch", "scipy", "numba", "torchvision", "transformers", "timm", "lightning", "accelerate"}


def test_the_package_is_there_at_once() -> None:
    found = loaded_by("import elbowroom; elbowroom.__version__; dir(elbowroom)")
    assert not found & (HEAVY | {"numpy", "rich", "typer", "psutil"})


def test_the_thinking_half_needs_no_torch() -> None:
    rooms = ("ir", "cost", "residency", "layout", "simulator", "planner", "report", "importers")
    thinking = [path for path in MODULES if path.relative_to(SOURCE).parts[1].removesuffix(".py") in (*rooms, "config")]
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__") for path in thinking]
    assert len(names) > 20
    found = loaded_by("import importlib; [importlib.import_module(n) for n in " + repr(names) + "]")
    assert not found & (HEAVY - {"numba", "scipy"})  # what compiles or solves is imported where it is needed


def test_thinking_verbs_need_no_torch() -> None:
    assert not loaded_by("import elbowroom as e; e.plan, e.price, e.simulate, e.check, e.load, e.save") & HEAVY


def test_every_verb_is_there() -> None:
    loaded_by("import elbowroom as e; [getattr(e, name) for name in e.__all__]; assert set(e.__all__) == set(dir(e))")
    with pytest.warns(FutureWarning, match="use_arena is now elbowroom.use_planned_allocator"):
        assert elbowroom.use_arena is elbowroom.use_planned_allocator
    with pytest.raises(AttributeError, match="no_such_verb"):
        elbowroom.no_such_verb  # noqa: B018


def test_versions_agree() -> None:
    assert elbowroom.__version__ == PROJECT["version"]
    assert PROJECT["version"] in (ROOT / "CHANGELOG.md").read_text()
