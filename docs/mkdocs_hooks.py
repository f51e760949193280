"""What the site has beyond the pages that people write: the command line, the reference and the examples.

MkDocs calls the functions (``hooks`` in mkdocs.yml). A module that says in ``__all__`` what is public gets a page of
the reference; the build stops where a public name has no docstring, and where a page or an example imports what is
not public. Each program in examples/ gets a page with its source, so that links to it hold.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import griffe
import typer
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from paceline import cli

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "paceline"

# Packages whose registry names classes, one file each, whose fields are the options people set.
REGISTRIES = {
    "paceline.balance": "POLICIES",
    "paceline.backup": "BACKUPS",
    "paceline.sync": "GATES",
    "paceline.forecast": "FORECASTS",
}


TORCHS = ("state_dict", "load_state_dict")  # methods whose names PyTorch gives a meaning


def _file(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _assigned(tree: ast.Module, name: str) -> ast.expr | None:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node.value
    return None


def _listed(module: str) -> list[str] | None:
    value = _assigned(ast.parse(_file(module).read_text(encoding="utf-8")), "__all__")
    return None if value is None else list(ast.literal_eval(value))


@cache
def public_modules() -> dict[str, list[str]]:
    """What each module with ``__all__`` says in it, by the module's name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        listed = _listed(module)
        if listed is not None:
            found[module] = listed
    return dict(sorted(found.items()))


def _told() -> Iterator[tuple[Path, str, str]]:
    """(page or example, module, name) of what their code imports of the package; the name is empty where a module
    itself is imported."""
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *_examples()):
        text = path.read_text(encoding="utf-8")
        for module in re.findall(r"^\s*import (paceline[\w.]*)", text, re.MULTILINE):
            yield path, module, ""
        for module, names in re.findall(r"^\s*from (paceline[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            yield from ((path, module, name.split()[0]) for name in names.split(",") if name.strip())


def not_public() -> list[str]:
    """What pages and examples import though no ``__all__`` has it: a sentence for each."""
    public = public_modules()
    return [
        f"{path.relative_to(ROOT)} imports {module}{name and '.' + name}, which no __all__ says to be public"
        for path, module, name in _told()
        if not (f"{module}.{name}" in public or (module in public and (not name or name in public[module])))
    ]


def undocumented() -> list[str]:
    """Public modules and names, and public methods of the classes among them, that have no docstring.

    A method needs none where a class or protocol that its class follows documents it, or another framework's class.
    """
    package = griffe.load("paceline", search_paths=[PACKAGE.parent])
    protocols = [kind for kind in _classes(package) if any("Protocol" in str(base) for base in kind.bases)]
    found = set()
    for module, names in public_modules().items():
        inside = package if module == "paceline" else package[module.removeprefix("paceline.")]
        if not inside.has_docstring:
            found.add(module)
        for name in names:
            if name.startswith("__"):
                continue
            member = inside[name]
            member = member.final_target if member.is_alias else member
            if member.is_module:  # a function named like the file that it stands in
                member = member[name]
            if not member.has_docstring:
                found.add(member.path)
            if member.is_class:
                found |= {f"{member.path}.{each}" for each in _silent(member, protocols)}
    return sorted(found)


def _classes(owner: griffe.Object) -> Iterator[griffe.Class]:
    for member in owner.members.values():
        if member.is_alias:
            continue
        if isinstance(member, griffe.Class):
            yield member
        if isinstance(member, griffe.Module):
            yield from _classes(member)


def _silent(kind: griffe.Class, protocols: list[griffe.Class]) -> list[str]:
    """Public methods and properties of a class without a docstring, their own or of what they override or follow."""
    bases = [base if isinstance(base, str) else base.canonical_path for base in kind.bases]
    if any("." in base and base.split(".")[0] not in ("paceline", "typing") for base in bases):
        return []
    above = [kind, *kind.mro()]
    has = {name for each in above for name in each.members}
    above += [each for each in protocols if {name for name in each.members if name[0] != "_"} <= has]
    return [
        name
        for name, member in kind.members.items()
        if not name.startswith("_")
        and name not in TORCHS
        and (member.is_function or "property" in member.labels)
        and not any(name in each.members and each.members[name].has_docstring for each in above)
    ]


def _registered(module: str) -> list[str]:
    """Full names of the classes in a package's registry."""
    tree = ast.parse(_file(module).read_text(encoding="utf-8"))
    registry = _assigned(tree, REGISTRIES[module])
    assert isinstance(registry, ast.Dict), f"{module}.{REGISTRIES[module]} is no plain dictionary"
    homes = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return [homes[value.id] for value in registry.values if isinstance(value, ast.Name)]


def _hidden(module: str) -> list[str]:
    """Public functions named like the file that defines them, which the module's own listing takes for the file."""
    return [name for name in _listed(module) or () if _file(f"{module}.{name}").is_file()]


def _page(module: str) -> str:
    page = f"# {module}\n\n::: {module}\n    options: {{show_root_heading: false}}\n"
    for name in _hidden(module):
        page += f"\n::: {module}.{name}.{name}\n"
    if module in REGISTRIES:
        page += "\n## By name\n\nWhat a name creates, with its options after a colon.\n"
        page += "".join(f"\n::: {name}\n    options: {{heading_level: 3}}\n" for name in _registered(module))
    return page


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.?])\s", text.replace("\n", " "), maxsplit=1)[0].rstrip(":")


def _index() -> str:
    rows = "\n".join(f"| [{m}]({m}.md) | {_first_sentence(_file(m))} |" for m in public_modules())
    return (
        "# Reference\n\nWhat is public, from the docstrings. Whatever is not here may change without notice.\n\n"
        f"| module | what it has |\n|---|---|\n{rows}\n"
    )


def _commands() -> str:
    """The page of the command line: each command's help and a table of its options."""
    page = "# Command line\n\n`paceline COMMAND --help` prints the same in a terminal.\n"
    for name in cli.COMMANDS:
        app = typer.main.get_command(cli._app(name))
        command = getattr(app, "commands", {name: app})[name]
        page += f"\n## paceline {name}\n\n{command.help}\n\n| option | default | meaning |\n|---|---|---|\n"
        for each in command.params:
            names = ", ".join(f"`{option}`" for option in (*each.opts, *each.secondary_opts))
            default = (
                "" if each.default in (None, False, ()) or callable(each.default) else f"`{each.default}`"
            )
            page += f"| {names} | {default} | {_cell(getattr(each, 'help', None) or '')} |\n"
    return page


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def on_config(config: Any) -> Any:
    """Stop where the public face has a hole; put the pages that are made here into the navigation."""
    wrong = [f"{name} is public and has no docstring" for name in undocumented()] + not_public()
    if wrong:
        raise PluginError("\n".join(wrong))
    pages = [{module: f"reference/{module}.md"} for module in public_modules()]
    examples = [{path.name: f"examples/{path.stem}.md"} for path in _examples()]
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = [
                {"Command line": "reference/commands.md"},
                *entry["Reference"],
                {"Python API": [{"Overview": "reference/index.md"}, *pages]},
                {"Examples": examples},
            ]
    return config


def _examples() -> list[Path]:
    return sorted((ROOT / "examples").rglob("*.py"))


def on_files(files: Files, config: Any) -> Files:
    """Add the reference's pages and the examples' sources."""
    made = {f"reference/{module}.md": _page(module) for module in public_modules()}
    made["reference/index.md"] = _index()
    made["reference/commands.md"] = _commands()
    for path in _examples():
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        made[f"examples/{path.stem}.md"] = f"# {path.stem}\n\n````python title={name!r}\n{source}````\n"
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links into examples/ lead to the pages made of it, and links to the README to the home page, which includes it
    in part; beside the sources they lead to the files.

    A picture is shown in light and in dark, and the theme hides one of the two.
    """
    markdown = re.sub(r"!\[([^\]]*)\]\((pictures/[\w-]+)(\.png|\.svg)\)", _in_both_schemes, markdown)
    markdown = re.sub(r"\]\(\.\./README\.md(#[\w-]+)?\)", r"](index.md\1)", markdown)
    return re.sub(r"\]\(\.\./examples/(?:\w+/)*(\w+)\.py\)", r"](examples/\1.md)", markdown)


def _in_both_schemes(picture: re.Match[str]) -> str:
    """An SVG has both schemes in one file (docs/pictures/common.py), a PNG has a dark twin."""
    says, name, kind = picture.groups()
    dark = name if kind == ".svg" else f"{name}-dark"
    return f"![{says}]({name}{kind}#only-light) ![{says}]({dark}{kind}#only-dark)"
