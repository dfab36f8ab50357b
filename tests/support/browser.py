"""Chromium under playwright, and what the tests of the page do with it."""

import shutil
from typing import TYPE_CHECKING, Any

from tests.frontend.conftest import DEADLINE

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def open_page(context: Any, url: str) -> Any:
    """Open a page that collects, as `complaints`, what its policy blocks and its scripts throw."""
    opened = context.new_page()
    opened.set_default_timeout(1000 * DEADLINE)
    opened.complaints = []
    opened.on("pageerror", lambda error: opened.complaints.append(str(error)))
    opened.on(
        "console",
        # Refusals of the server are noted there, too.
        lambda message: opened.complaints.append(message.text) if "policy" in message.text.lower() else None,
    )
    opened.goto(url)
    return opened


def ask(page: "Page", text: str) -> None:
    page.get_by_label("Prompt", exact=True).fill(text)
    page.keyboard.press("Enter")


def ended(page: "Page", count: int) -> None:
    """Wait until this number of answers has ended."""
    page.locator(".measures").nth(count - 1).wait_for()


def answers(page: "Page") -> list[str]:
    return page.locator(".answer").all_text_contents()


def questions(page: "Page") -> list[str]:
    return page.locator(".prompt").all_text_contents()


def measures(page: "Page", index: int = 0) -> str:
    return page.locator(".measures").nth(index).text_content() or ""
