"""ComfyUI's page in a real browser: open our template from the template browser, queue it, wait for the picture.

Needs Chromium (Debian's package `chromium`). Screenshots are kept under `build/browser/`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.comfyui import PACK, ROOT, ComfyUI
from tests.graphs import SAMPLER, template

playwright = pytest.importorskip("playwright.sync_api")

pytestmark = pytest.mark.comfy

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SCREENSHOTS = ROOT / "build" / "browser"
READY = "() => window.app?.graph && document.querySelector('canvas')"
TYPES = "() => window.app.graph._nodes.map(node => [node.type, node.constructor.nodeData?.display_name ?? ''])"
WIDGETS = (
    "type => window.app.graph._nodes.find(node => node.type === type).widgets.map(each => [each.name, each.value])"
)
PICTURES = "() => window.app.graph._nodes.find(node => node.type === 'SaveImage').imgs?.length ?? 0"
OVERLAPS = """() => {
    const boxes = window.app.graph._nodes.map(n => [n.title, n.pos[0], n.pos[1] - 30, n.pos[0] + n.size[0], n.pos[1] + n.size[1]])
    const apart = (a, b) => a[3] <= b[1] || b[3] <= a[1] || a[4] <= b[2] || b[4] <= a[2]
    return boxes.flatMap((a, i) => boxes.slice(i + 1).filter(b => !apart(a, b)).map(b => [a[0], b[0]]))
}"""


@pytest.fixture
def page(comfyui: ComfyUI) -> Iterator:
    """ComfyUI's page, for a user who is new to it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None and not os.environ.get("OUTRIGGER_CI"):
        pytest.skip("needs Chromium on the PATH (apt-get install chromium)")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=list(FLAGS))
        page = browser.new_page(viewport={"width": 1680, "height": 1000})
        page.goto(comfyui.url)
        page.wait_for_function(READY, timeout=120_000)
        yield page
        browser.close()


def screenshot(page, name: str) -> Path:
    """Keep a picture of the page."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")
    return SCREENSHOTS / f"{name}.png"


def open_template(page, name: str) -> None:
    """Through the template browser, which greets a new user, as a user does."""
    page.wait_for_timeout(3000)  # it comes by itself to a user who has no workflow open yet
    if not page.get_by_text("All Templates").first.is_visible():
        page.evaluate("() => window.app.extensionManager.command.execute('Comfy.BrowseTemplates')")
    page.get_by_text(PACK, exact=True).first.click(timeout=60_000)
    page.get_by_text(name, exact=True).first.wait_for(timeout=60_000)
    screenshot(page, "templates")
    page.get_by_text(name, exact=True).first.click()
    page.wait_for_function("() => window.app.graph._nodes.length > 5", timeout=60_000)
    page.evaluate("() => window.app.extensionManager.command.execute('Comfy.Canvas.FitView')")
    page.wait_for_timeout(1000)


@pytest.mark.parametrize(("name", "pictures"), [("text_to_image", 1), ("text_to_video", 9)])
def test_template_from_the_template_browser_makes_its_pictures(comfyui: ComfyUI, page, name: str, pictures: int):
    open_template(page, name)
    assert all(known for kind, known in page.evaluate(TYPES) if kind != "MarkdownNote")
    shown = dict(page.evaluate(WIDGETS, "OutriggerSampler"))
    wanted = {key: value for key, value in template(name)[SAMPLER]["inputs"].items() if not isinstance(value, list)}
    assert {key: shown[key] for key in wanted} == wanted
    page.evaluate("() => window.app.queuePrompt(0)")
    page.wait_for_function(f"() => ({PICTURES})() === {pictures}", timeout=180_000)
    page.wait_for_timeout(1500)
    assert page.evaluate(OVERLAPS) == []
    assert screenshot(page, name).stat().st_size > 50_000


def test_a_plan_that_does_not_fit_is_shown_on_the_page(comfyui: ComfyUI, page):
    open_template(page, "text_to_image")
    page.evaluate(
        "() => { window.app.graph._nodes.find(n => n.type === 'OutriggerParallelism').widgets"
        ".find(w => w.name === 'ulysses').value = 4 }"
    )
    page.evaluate("() => window.app.queuePrompt(0)")
    page.get_by_text("cpu:2 is 2 devices").first.wait_for(timeout=30_000)
    assert page.content().count("cpu:2 is 2 devices") == 1
    screenshot(page, "refused")
