"""Turns the parameters in the prose of a docstring, ``name: what it is``, into a list on the reference's pages."""

from __future__ import annotations

import re
from typing import Any

import griffe

NAMED = re.compile(r"(?:(?<=^)|(?<=\n)|(?<=[.;)] ))((?:[a-z_]\w*, )*[a-z_]\w*): ")


def listed(text: str, names: set[str]) -> str:
    """The paragraphs of a docstring, each run of ``name: ...`` in them as a list."""
    return "\n\n".join(_listed(paragraph, names) for paragraph in text.split("\n\n"))


def _listed(paragraph: str, names: set[str]) -> str:
    if paragraph.startswith(("    ", "- ", "|", "Args:", "Attributes:", "Returns:", "Raises:")):
        return paragraph
    found = [m for m in NAMED.finditer(paragraph) if set(m[1].split(", ")) <= names]
    if not found:
        return paragraph
    lead = paragraph[: found[0].start()].rstrip()
    ends = [match.start() for match in found[1:]] + [len(paragraph)]
    items = [
        f"- `{match[1].replace(', ', '`, `')}`: " + " ".join(paragraph[match.end() : end].split())
        for match, end in zip(found, ends, strict=True)
    ]
    return "\n".join([lead, "", *items] if lead else items)


def _fields(member: griffe.Object) -> str:
    """The fields of a NamedTuple, which has no signature of its own, if its docstring does not list them."""
    listed = member.docstring is not None and "\nAttributes:\n" in member.docstring.value
    if listed or not (member.is_class and any("NamedTuple" in str(base) for base in member.bases)):
        return ""
    fields = [f"`{name}: {each.annotation}`" for name, each in member.members.items() if each.is_attribute]
    return "\n\nFields: " + ", ".join(fields)


class Fields(griffe.Extension):
    """Applied to every class and function of the package."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        self._walk(pkg)

    def _walk(self, owner: griffe.Object) -> None:
        for member in owner.members.values():
            if member.is_alias or not (member.is_class or member.is_function or member.is_module):
                continue
            if member.docstring is not None and not member.is_module:
                names = set(member.members)
                if member.is_function:
                    names |= {parameter.name for parameter in member.parameters}
                elif "__init__" in member.members:
                    names |= {parameter.name for parameter in member.members["__init__"].parameters}
                member.docstring.value = listed(member.docstring.value, names) + _fields(member)
            self._walk(member)
