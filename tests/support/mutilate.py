"""Files as disks, editors and careless scripts leave them."""

from __future__ import annotations

import re
import zlib

from hypothesis import strategies as st


@st.composite
def mutilations(draw: st.DrawFn, sound: bytes) -> bytes:
    """A file that is not what was written: a line dropped, doubled, swapped, longer, a byte flipped, an end lost."""
    lines = sound.splitlines(keepends=True)
    kind = draw(st.sampled_from(["drop", "double", "swap", "add", "flip", "cut", "insert", "join"]))
    at = draw(st.integers(0, len(lines) - 1))
    other = draw(st.integers(0, len(lines) - 1).filter(lambda i: i != at))
    place = draw(st.integers(0, len(sound) - 1))
    if kind == "drop":
        return b"".join(lines[:at] + lines[at + 1 :])
    if kind == "double":
        return b"".join([*lines[: at + 1], lines[at], *lines[at + 1 :]])
    if kind == "swap":
        lines[at], lines[other] = lines[other], lines[at]
        return b"".join(lines)
    if kind == "add":
        lines[at] = lines[at].rstrip(b"\n") + draw(st.sampled_from([b",0", b",", b',"x"', b";1"])) + b"\n"
        return b"".join(lines)
    if kind == "flip":
        return sound[:place] + bytes([sound[place] ^ draw(st.integers(1, 255))]) + sound[place + 1 :]
    if kind == "cut":
        return sound[:place]
    if kind == "insert":
        return sound[:place] + draw(st.binary(min_size=1, max_size=4)) + sound[place:]
    return sound[:place] + sound[draw(st.integers(place, len(sound))) :]


def with_new_checksums(content: bytes) -> bytes:
    """A record with the checksums that it would have had if its lines had been written as they are."""
    lines, above = [], 0
    for line in content.splitlines(keepends=True):
        bare = re.sub(rb',"sum":"[0-9a-f]{8}"\}$', b"}", line.rstrip(b"\n"))
        if bare.endswith(b"}") and line.endswith(b"\n"):
            above = zlib.crc32(bare[:-1], above)
            line = bare[:-1] + b',"sum":"%08x"}\n' % above
        lines.append(line)
    return b"".join(lines)
