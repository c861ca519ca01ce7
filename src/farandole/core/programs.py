"""How our programs reach nodes, which have no package of ours: as modules with a launcher, or as a single text."""

import ast
from collections.abc import Mapping
from pathlib import Path

import farandole

SOURCE = Path(farandole.__file__).parents[1]
# Where nodes have modules, in the same folders as here.
LIBRARY = "/usr/local/lib/farandole"
LAUNCHER = f"""\
#!/usr/bin/python3 -IB
import sys

sys.path.insert(0, "{LIBRARY}")
from MODULE import main

sys.exit(main())
"""
BUNDLE = """\
import sys, types
for name, source in {modules!r}.items():
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), vars(module))
    package, _, own = name.rpartition(".")
    setattr(sys.modules.setdefault(package, types.ModuleType(package)), own, module)
exec(compile({source!r}, {name!r}, "exec"))
"""


def program_files(program: str, commands: Mapping[str, str]) -> list[dict[str, str]]:
    """What write_files has to write: a program with what it imports, and commands, by path, that call a `main`."""
    own = SOURCE / program.replace(".", "/")
    modules = sorted(own.rglob("*.py")) if own.is_dir() else [own.with_suffix(".py")]
    modules += [_file(name) for path in modules for name in imported(path.read_text())]
    packages = {folder / "__init__.py" for path in modules for folder in path.parents if SOURCE in folder.parents}
    paths = dict.fromkeys([*sorted(packages), *modules])
    files = {f"{LIBRARY}/{path.relative_to(SOURCE)}": (path.read_text(), "0644") for path in paths}
    # Last, so that a command never lacks its modules.
    files |= {path: (LAUNCHER.replace("MODULE", module), "0755") for path, module in commands.items()}
    return [{"path": path, "content": text, "mode": mode} for path, (text, mode) in files.items()]


def program_folder(package: str) -> str:
    return str(SOURCE / package.replace(".", "/"))


def bundle(module: str) -> str:
    """The text of a program together with the modules that it imports, for `python -c`."""
    text = source(module)
    return BUNDLE.format(modules=imported(text), source=text, name=module)


def source(module: str) -> str:
    return _file(module).read_text()


def _file(module: str) -> Path:
    return SOURCE / f"{module.replace('.', '/')}.py"


def imported(text: str) -> dict[str, str]:
    """The texts of our modules that a program imports, by name, each after those that it imports itself."""
    texts: dict[str, str] = {}
    for statement in ast.walk(ast.parse(text)):
        if isinstance(statement, ast.ImportFrom) and str(statement.module).startswith("farandole."):
            for name in (str(statement.module), *(f"{statement.module}.{alias.name}" for alias in statement.names)):
                if _file(name).is_file():
                    own = source(name)
                    texts |= {**imported(own), name: own}
    return texts
