"""The live page of a run: ``paceline watch`` shows it, ``paceline serve`` mounts it.

    app("runs/first")                   # an ASGI application: the page at /, the data it requests beside it
    Mount("/runs/{name}/live", app(lambda request: Path("runs") / request.path_params["name"]))

The page reads only the record that every engine writes.
"""

from paceline.live.pages import app
from paceline.live.tail import Tail

__all__ = ["Tail", "app"]
