"""The report in a real browser: cards that can be copied as pictures, and nothing that shuts somebody out."""

from __future__ import annotations

import base64
import io
from xml.etree import ElementTree

import numpy as np
import pytest

from paceline.runs import report
from support import browsers
from support.guarantees import guarantee

GUARANTEES = (
    "A card that is copied as PNG or SVG is a light picture of at "
    "least 1920 by 1080 pixels, also from a dark page.",
)

SLOW = np.array([0.001, 0.001, 0.001, 0.004])
READ = """async (kind) => {
  const [item] = await navigator.clipboard.read(), data = await item.getType(kind);
  const bytes = new Uint8Array(await data.arrayBuffer());
  return btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
}"""


@pytest.fixture(scope="module")  # its event loop must not be there when another module's tests run theirs
def chromium():
    with browsers.chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def pages(ran_once, tmp_path_factory):
    """A report and a comparison, with waiting, and with rounds of fewer samples."""
    tmp_path = tmp_path_factory.mktemp("pages")
    level = np.tile([24, 24, 24, 6], (12, 1))
    level[5::6] = 12, 12, 12, 3
    runs = [ran_once("equal", 16, SLOW, rounds=12, policy="equal"), ran_once("level", level, SLOW)]
    many = ran_once("many", 16, np.tile(SLOW, (12, 5)))
    texts = {
        "report": report.render(runs[1]),
        "comparison": report.render_comparison(runs),
        "many": report.render(many),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.html").write_text(text)
    return {name: (tmp_path / f"{name}.html").as_uri() for name in texts}


@guarantee(
    "axe finds nothing serious on the first page of the docs, the report, a comparison, the live page and "
    "the service's page."
)
@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 400)])
def test_axe_finds_nothing_serious(chromium, pages, scheme, width):
    for address in pages.values():
        page = browsers.opened(chromium, viewport={"width": width, "height": 900}, color_scheme=scheme)
        page.goto(address)
        page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert browsers.barriers(page) == []
        page.close()


def test_axe_finds_what_is_wrong(chromium):
    page = browsers.opened(chromium)
    page.set_content(
        "<html lang=en><title>t</title><main><button></button><p style='color:#ccc'>pale</p></main>"
    )
    assert {each.split()[0] for each in browsers.barriers(page)} == {"button-name", "color-contrast"}
    page.close()


def test_each_card_is_copied_as_a_picture_for_a_slide(chromium, pages):
    image = pytest.importorskip("PIL.Image")
    context = chromium.new_context(color_scheme="dark", permissions=["clipboard-read", "clipboard-write"])
    page, wrong = browsers.opened(context), []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: said.type == "error" and wrong.append(said.text))
    for address, some in ((pages["comparison"], ""), (pages["many"], ":has(.band)")):
        page.goto(address)
        for figure in page.locator(f".charts:not(details *) > figure:has(.copy){some}").all():
            title = figure.locator("h3").inner_text()
            for kind in ("PNG", "SVG"):
                figure.get_by_role("button", name=f"Copy as {kind}").click()
                figure.locator("[role=status]", has_text="Copied").wait_for()
                mime = {"PNG": "image/png", "SVG": "text/plain"}[kind]
                content = base64.b64decode(page.evaluate(READ, mime))
                if kind == "PNG":
                    picture = image.open(io.BytesIO(content)).convert("RGB")
                    assert picture.size[0] == 1920
                    assert picture.size[1] >= 1080
                    assert picture.getpixel((2, 2)) == (255, 255, 255), "what is copied is light"
                    assert len(picture.getcolors(1 << 22)) > 20
                    continue
                assert b"http" not in content.replace(b"http://www.w3.org/", b"")
                root = ElementTree.fromstring(content)
                words = ["".join(each.itertext()) for each in root.iter("{http://www.w3.org/2000/svg}text")]
                assert words[0] == title
                assert not {"PNG", "As a table"} & set(words)
                titles = figure.locator(".title").all_inner_texts()
                assert set(titles) <= set(words)
    assert wrong == []
    context.close()


def test_a_picture_shows_what_the_card_shows(chromium, pages):
    """The straggler's and the workers' colours, of the light theme, in the part of the picture where they are."""
    image = pytest.importorskip("PIL.Image")
    context = chromium.new_context(permissions=["clipboard-read", "clipboard-write"])
    page = browsers.opened(context)
    page.goto(pages["comparison"])
    figure = page.locator("figure", has_text="The last 10 rounds of each")
    figure.get_by_role("button", name="Copy as PNG").click()
    figure.locator("[role=status]", has_text="Copied").wait_for()
    picture = image.open(io.BytesIO(base64.b64decode(page.evaluate(READ, "image/png")))).convert("RGB")
    pixels = np.asarray(picture)
    shares = {
        name: float((np.abs(pixels.astype(int) - colour).max(axis=2) < 6).mean())
        for name, colour in {
            "computing": (81, 101, 123),
            "straggler": (213, 94, 0),
            "hatch": (123, 134, 148),
        }.items()
    }
    assert min(shares.values()) > 0.005, shares
    left = pixels[:, : pixels.shape[1] // 2]
    orange = np.abs(left.astype(int) - (213, 94, 0)).max(axis=2) < 6
    assert orange[: orange.shape[0] // 4].sum() < orange.sum() / 2, "worker 3 is the lowest row"
    context.close()


def test_without_the_right_to_the_clipboard_a_file_is_saved(chromium, pages):
    context = chromium.new_context(accept_downloads=True)
    page = browsers.opened(context)
    page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.goto(pages["report"])
    with page.expect_download() as download:
        page.get_by_role("button", name="Copy as SVG").first.click()
    assert download.value.suggested_filename == "time-per-round.svg"
    page.locator("[role=status]", has_text="Saved").wait_for()
    context.close()


def test_without_a_script_there_is_no_button_that_does_nothing(chromium, pages):
    context = chromium.new_context(java_script_enabled=False)
    page = browsers.opened(context)
    page.goto(pages["report"])
    assert page.get_by_role("button", name="Copy as PNG").count() == 0
    assert page.locator("figure").count() >= 7
    context.close()
