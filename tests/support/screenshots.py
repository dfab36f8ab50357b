"""Take the README's pictures of the playground: `python -m tests.support.screenshots`.

It serves the default model with the tree's own code, asks two questions in headless Chromium, and writes
`docs/playground-WIDTH.png`. Needs the `dev` extra and a Chromium.
"""

import sys
import tempfile
from pathlib import Path

from tests.support.browser import CHROMIUM, ask, ended, open_page
from tests.support.serving import Serving

FOLDER = Path(__file__).parents[2] / "docs"
SIZES = ((1280, 720), (375, 667))
MAX_BYTES = 120_000


def take(url: str, width: int, height: int) -> Path:
    """Take the picture of one width, with the answers of the server at this address."""
    from playwright.sync_api import sync_playwright

    path = FOLDER / f"playground-{width}.png"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        narrow = width < 600
        with browser.new_context(
            viewport={"width": width, "height": height}, has_touch=narrow, is_mobile=narrow
        ) as context:
            page = open_page(context, url)
            page.locator("#status:not(.bad)", has_text="tandem-default").wait_for()
            page.get_by_role("button", name="What does textwrap.dedent do?").click()
            ended(page, 1)
            ask(page, "How do I join two paths?")
            ended(page, 2)
            page.screenshot(path=path)
        browser.close()
    return path


def main() -> None:
    """Take all pictures."""
    if CHROMIUM is None:
        sys.exit("no Chromium is installed; its package is called chromium")
    with tempfile.TemporaryDirectory() as folder, Serving(Path(folder) / "log") as serving:
        for width, height in SIZES:
            path = take(serving.url, width, height)
            size = path.stat().st_size
            assert size <= MAX_BYTES, f"{path} has {size} bytes, more than {MAX_BYTES}"
            print(f"{path.name}: {size} bytes")


if __name__ == "__main__":
    main()
