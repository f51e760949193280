"""The live page of a run: ``paceline watch`` shows it, ``paceline serve`` mounts it.

    app("runs/first")                   # an ASGI application: the page at /, what it asks for beside it
    Mount("/runs/{name}/live", app(lambda request: Path("runs") / request.path_params["name"]))

It reads the record that every engine writes, and nothing else. Needs ``paceline[serve]``.
"""

from paceline.live.pages import app
from paceline.live.tail import Tail

__all__ = ["Tail", "app"]
