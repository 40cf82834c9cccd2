"""What of a release concerns us, as one table for each kind: a name that has a file and a class in front, and what is said of it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cached_property

from .sources import Release, parsed

Table = dict[str, object]

MAPPING = re.compile(r"(CONFIG|MODEL)_\w*MAPPING_NAMES$")
# Files whose fields, defaults and names of a module concern us; of transformers, the configurations.
CONFIGURED = {
    "transformers": re.compile(r"(^|/)configuration_\w+\.py$|distributed/configuration_utils\.py$"),
    "torch": re.compile(r"$^"),
    "nemo_automodel": re.compile(r"distributed|parallel|config|_dist"),
    "deepspeed": re.compile(r"config|module_inject/(auto_tp|layers)|tensor_parallel"),
}


class Facts:
    """The tables of a release."""

    def __init__(self, release: Release) -> None:
        self.release = release
        self.package = release.package
        self._lines_of: dict[str, list[str]] = {}

    def _classes(self) -> Iterator[tuple[str, str, ast.ClassDef]]:
        for path, tree in self.release.trees.items():
            for node in tree.body:
                if isinstance(node, ast.ClassDef):
                    yield path, f"{_place(path)}.{node.name}", node

    def _configured(self, path: str) -> bool:
        return bool(CONFIGURED[self.package].search(path))

    @cached_property
    def types(self) -> Table:
        """Model types -> their class, for each mapping of the auto classes."""
        found: Table = {}
        for path, tree in self.release.trees.items():
            if path.startswith("models/auto/"):
                for node in tree.body:
                    if isinstance(node, ast.Assign | ast.AnnAssign) and MAPPING.match(name := _target(node)):
                        found |= {f"{name}[{key}]": said for key, said in _pairs(node.value)}
        return found

    @cached_property
    def plans(self) -> Table:
        """Plans: fields of classes, or of modules, whose name has "plan" in it, and functions that make one."""
        found: Table = {}
        for path, tree in self.release.trees.items():
            for node in tree.body:
                if isinstance(node, ast.Assign | ast.AnnAssign) and "plan" in (name := _target(node)).lower():
                    found[f"{_place(path)}.{name}"] = _value(node.value)
                elif isinstance(node, ast.FunctionDef) and self.package == "nemo_automodel" and _makes_plan(path, node):
                    found[f"{_place(path)}.{node.name}"] = _pairs_of(node) or self._body(path, node)
                elif isinstance(node, ast.ClassDef):
                    for one in node.body:
                        if isinstance(one, ast.Assign | ast.AnnAssign) and (name := _target(one)).endswith("_plan"):
                            found[f"{_place(path)}.{node.name}.{name}"] = _value(one.value)
        return found

    @cached_property
    def arguments(self) -> Table:
        """forward of each class -> the names of its arguments."""
        return {
            f"{name}.forward": tuple(_names(method.args)[1:])
            for _, name, node in self._classes()
            for method in _methods(node)
            if method.name == "forward" and self.package == "transformers"
        }

    @cached_property
    def modules(self) -> Table:
        """Class and attribute -> the module, parameter or buffer that `__init__` makes for it."""
        return {
            f"{name}.{target.attr}": ast.unparse(one.value)
            for path, name, node in self._classes()
            if self.package == "transformers" and path.startswith("models/")
            for method in _methods(node)
            if method.name == "__init__"
            for one in ast.walk(method)
            if isinstance(one, ast.Assign) and any(isinstance(part, ast.Call) for part in ast.walk(one.value))
            for target in one.targets
            if isinstance(target, ast.Attribute) and _makes(one.value)
        }

    @cached_property
    def code(self) -> Table:
        """Class -> its methods but those that make modules and fill parameters -> their lines."""
        return {
            name: {
                method.name: self._body(path, method)
                for method in _methods(node)
                if method.name not in ("__init__", "_init_weights")
            }
            for path, name, node in self._classes()
            if self.package == "transformers" and re.match(r"models/\w+/modeling_", path)
        }

    @cached_property
    def fields(self) -> Table:
        """Fields of classes of configurations, and arguments of functions next to them -> the default."""
        found: Table = {}
        for path, name, node in self._classes():
            if self._configured(path):
                for one in node.body:
                    if isinstance(one, ast.AnnAssign) and not _target(one).endswith("_plan"):
                        found[f"{name}.{_target(one)}"] = ast.unparse(one.value) if one.value else "needed"
                for method in _methods(node):
                    if not method.name.startswith("_") or method.name == "__init__":
                        found |= {f"{name}.{method.name}({key})": said for key, said in _defaults(method)}
        for path, tree in self.release.trees.items():
            if self._configured(path) and self.package != "transformers":
                for one in tree.body:
                    if isinstance(one, ast.FunctionDef):
                        found |= {f"{_place(path)}.{one.name}({key})": said for key, said in _defaults(one)}
        return found

    @cached_property
    def names(self) -> Table:
        """What a module of configurations or of ways to distribute offers: classes, functions, constants."""
        found: Table = {}
        for path, tree in self.release.trees.items():
            if self._configured(path) and self.package != "transformers":
                for node in tree.body:
                    if isinstance(node, ast.ClassDef):
                        found[f"{_place(path)}.{node.name}"] = f"class({', '.join(map(ast.unparse, node.bases))})"
                    elif isinstance(node, ast.FunctionDef):
                        found[f"{_place(path)}.{node.name}"] = "function"
                    elif isinstance(node, ast.Assign | ast.AnnAssign) and _target(node):
                        found[f"{_place(path)}.{_target(node)}"] = "constant"
        return found

    @cached_property
    def notices(self) -> Table:
        """What configurations and ways to distribute say of themselves that goes: class or function -> the text."""
        found: Table = {}
        for path, tree in self.release.trees.items():
            if self._configured(path) or path.startswith("distributed/"):
                for node in tree.body:
                    if isinstance(node, ast.ClassDef | ast.FunctionDef):
                        texts = [
                            _joined(one) for one in ast.walk(node) if isinstance(one, ast.Constant | ast.JoinedStr)
                        ]
                        found |= {
                            f"{_place(path)}.{node.name}": text
                            for text in texts
                            if re.search(r"deprecated|will be removed", text) and "\n" not in text
                        }
        return found

    @cached_property
    def private(self) -> Table:
        """Private names that we read -> whether the release has them: in the module, or in a class of that name."""
        from shardplan.torchlib.private import NAMES
        from shardplan.torchlib.private_attributes import ATTRIBUTES

        places = [place for entry in NAMES.values() for place in entry.places]
        found: Table = {}
        for module, name in places:
            if module.partition(".")[0] == self.package:
                found[f"{module}.{name}".rstrip(".")] = self._has(module, "", name)
        for one in ATTRIBUTES:
            if one.module.partition(".")[0] == self.package:
                found |= {
                    f"{one.module}.{one.owner}.{name}": self._has(one.module, one.owner.rpartition(".")[2], name)
                    for name in one.names
                }
        return {name: "there" for name, there in found.items() if there}

    def _has(self, module: str, owner: str, name: str) -> bool:
        if owner:
            return name in self._words_of_classes.get(owner, frozenset()) or name in self._words_of_classes.get(
                f"{owner}Base", frozenset()
            )
        base = "/".join(module.split(".")[1:])
        files = [
            one
            for one in (f"{base}.py", f"{base}/__init__.py", f"{base}.pyi", f"{base}/__init__.pyi")
            if one in self.release.texts
        ]
        return bool(files) and (not name or any(re.search(rf"\b{name}\b", self.release.texts[one]) for one in files))

    @cached_property
    def _words_of_classes(self) -> dict[str, frozenset[str]]:
        """The words of the classes that have private names, wherever they are."""
        from shardplan.torchlib.private_attributes import ATTRIBUTES

        names = "|".join({one.owner.rpartition(".")[2] for one in ATTRIBUTES if one.owner})
        wanted = re.compile(rf"^class ({names})(Base)?\b", re.MULTILINE)
        found: dict[str, frozenset[str]] = {}
        for path, text in self.release.texts.items():
            if "\nclass " in f"\n{text}" and wanted.search(text) and (tree := parsed(text)) is not None:
                for node in tree.body:
                    if isinstance(node, ast.ClassDef):
                        lines = "\n".join(self._lines(path)[node.lineno - 1 : node.end_lineno])
                        found[node.name] = found.get(node.name, frozenset()) | frozenset(re.findall(r"\w+", lines))
        return found

    def _body(self, path: str, function: ast.FunctionDef) -> str:
        """The lines of a function without its signature and docstring."""
        first = function.body[0]
        is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        begin = first.end_lineno if is_text else first.lineno - 1
        return "\n".join(self._lines(path)[begin : function.end_lineno])

    def _lines(self, path: str) -> list[str]:
        if path not in self._lines_of:
            self._lines_of[path] = self.release.texts[path].splitlines()
        return self._lines_of[path]

    @cached_property
    def types_of_folders(self) -> dict[str, tuple[str, ...]]:
        """Folder of models/ -> the model types whose configurations are in it."""
        found: dict[str, list[str]] = {}
        for path, text in self.release.texts.items():
            if match := re.match(r"models/(\w+)/configuration_", path):
                found.setdefault(match[1], []).extend(re.findall(r'^    model_type\b.*= "(\w+)"', text, re.MULTILINE))
        return {folder: tuple(names) for folder, names in found.items()}


def _makes_plan(path: str, node: ast.FunctionDef) -> bool:
    return "plan" in node.name or "plan" in path.rpartition("/")[2]


def _pairs_of(function: ast.FunctionDef) -> dict[str, str]:
    """The entries of the dictionaries in a function: names of modules -> styles, as the code has them."""
    return {
        " ".join(ast.unparse(key).strip("f'\"").split()): ast.unparse(value)
        for one in ast.walk(function)
        if isinstance(one, ast.Dict)
        for key, value in zip(one.keys, one.values, strict=True)
        if isinstance(key, ast.Constant | ast.JoinedStr)
    }


def _place(path: str) -> str:
    return path.removesuffix(".pyi").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    return (one for one in node.body if isinstance(one, ast.FunctionDef))


def _names(args: ast.arguments) -> list[str]:
    return [one.arg for one in (*args.posonlyargs, *args.args, *args.kwonlyargs)]


def _defaults(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    args = function.args
    places = [*args.posonlyargs, *args.args]
    values = [None] * (len(places) - len(args.defaults)) + list(args.defaults) + list(args.kw_defaults)
    for one, value in zip([*places, *args.kwonlyargs], values, strict=True):
        if one.arg not in ("self", "cls"):
            yield one.arg, ast.unparse(value) if value is not None else "needed"


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def _value(node: ast.expr | None) -> object:
    if node is None:
        return "needed"
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def _pairs(node: ast.expr | None) -> Iterator[tuple[str, str]]:
    for one in ast.walk(node) if node else ():
        if isinstance(one, ast.Tuple) and len(one.elts) == 2 and isinstance(one.elts[0], ast.Constant):
            yield str(one.elts[0].value), ast.unparse(one.elts[1]).strip("'")
        elif isinstance(one, ast.Dict):
            for key, said in zip(one.keys, one.values, strict=True):
                if isinstance(key, ast.Constant):
                    yield str(key.value), ast.unparse(said).strip("'")


def _joined(node: ast.Constant | ast.JoinedStr) -> str:
    """The text of a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(one.value if isinstance(one, ast.Constant) else "..." for one in node.values)


def _makes(value: ast.expr) -> bool:
    """Whether an expression makes a module, a parameter or a buffer: something with a capital is called in it."""
    called = [part.func for part in ast.walk(value) if isinstance(part, ast.Call)]
    names = [
        one.attr if isinstance(one, ast.Attribute) else one.id if isinstance(one, ast.Name) else "" for one in called
    ]
    return any(name[:1].isupper() for name in names)
