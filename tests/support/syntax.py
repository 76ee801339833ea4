"""What a module's syntax tree says: what it imports and uses, how long its functions are."""

import ast


def imported(tree):
    """The dotted names of everything that a module imports, wherever in it; `from a import b` is `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def used(tree):
    """The dotted names that stand in a module, such as `jax.tree.map`, with its `import ... as` undone."""
    names = {
        alias.asname: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.asname
    }
    for node in ast.walk(tree):
        path = []
        while isinstance(node, ast.Attribute):
            path.append(node.attr)
            node = node.value  # noqa: PLW2901
        if path and isinstance(node, ast.Name):
            yield ".".join([names.get(node.id, node.id), *reversed(path)])


def lines_of(function):
    """How many lines a function has, without its docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function) is not None
    docstring = first.end_lineno - first.lineno + 1 if documented else 0
    return function.end_lineno - function.lineno + 1 - docstring


def arguments_of(class_):
    """How many arguments a class's constructor takes; those of a dataclass are its fields."""
    for node in class_.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1
    generated = any("dataclass" in ast.unparse(decorator) for decorator in class_.decorator_list)
    generated |= any("NamedTuple" in ast.unparse(base) for base in class_.bases)
    fields = [node for node in class_.body if isinstance(node, ast.AnnAssign)]
    return len([field for field in fields if "init=False" not in ast.unparse(field)]) if generated else 0


def named(tree, kind, prefix=""):
    """All functions or classes in a tree, with their dotted names."""
    for node in ast.iter_child_nodes(tree):
        name = f"{prefix}{node.name}" if hasattr(node, "name") and hasattr(node, "body") else prefix
        if isinstance(node, kind):
            yield name, node
        yield from named(node, kind, f"{name}." if name and name != prefix else prefix)
