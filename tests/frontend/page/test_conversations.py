"""Conversations on the page: asked again, edited, copied, kept in the browser, and shown on a phone."""

from typing import TYPE_CHECKING, Any

from tests.fakes.engine import FakeEngine
from tests.frontend.conftest import RunningServer, until
from tests.support.browser import answers, ask, ended, measures, open_page, questions
from tests.support.scripted_server import RAW, prompts, say
from tests.support.shared_frontend import shared_fixtures

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE = {"width": 375, "height": 667}

shared, engine, server = shared_fixtures()


def titles(page: "Page") -> list[str]:
    return page.locator("#chat_list .chat").all_text_contents()


def hold(page: "Page", engine: FakeEngine, *turns: tuple[str, str]) -> None:
    """Hold a conversation of these questions and answers."""
    for count, (question, answer) in enumerate(turns, 1):
        say(engine, answer)
        ask(page, question)
        ended(page, count)


def test_retry_answers_the_last_question_again(page: "Page", engine: FakeEngine) -> None:
    hold(page, engine, ("first", "one"), ("second", "two"))
    retries = page.get_by_role("button", name="Ask again")
    assert retries.count() == 1, "only the last answer can be replaced"
    say(engine, "three")
    retries.click()
    page.locator(".answer", has_text="three").wait_for()
    ended(page, 2)
    assert answers(page) == ["one", "three"]
    assert prompts(engine)[2] == prompts(engine)[1]


def test_an_edited_question_is_asked_again_and_ends_what_followed(page: "Page", engine: FakeEngine) -> None:
    hold(page, engine, ("first", "one"), ("second", "two"), ("third", "three"))
    page.get_by_role("button", name="Edit question").nth(1).click()
    box = page.get_by_label("Question", exact=True)
    assert box.input_value() == "second"
    box.press("Escape")
    assert questions(page) == ["first", "second", "third"]
    page.get_by_role("button", name="Edit question").nth(1).click()
    say(engine, "changed answer")
    box.fill("changed question")
    box.press("Enter")
    page.locator(".answer", has_text="changed answer").wait_for()
    ended(page, 2)
    assert (questions(page), answers(page)) == (["first", "changed question"], ["one", "changed answer"])
    assert prompts(engine)[3] == "user: first\nassistant: one\nuser: changed question\nassistant:"


def test_messages_and_code_can_be_copied(browser: "Browser", server: RunningServer, engine: FakeEngine) -> None:
    text = "Use *this*:\n\n```python\nx = 1\n\ny = 2\n```\n\nand that."
    with browser.new_context(permissions=["clipboard-read", "clipboard-write"]) as context:
        page = open_page(context, server.url)
        hold(page, engine, ("which one", text))
        # A button says so for a moment only.
        page.evaluate(
            """() => {
                window.shown = [];
                const watcher = new MutationObserver((changes) =>
                    changes.forEach((one) => window.shown.push(one.target.textContent)));
                watcher.observe(document.body, { subtree: true, childList: true });
            }"""
        )
        for name, copied in (("Copy answer", text), ("Copy code", "x = 1\n\ny = 2"), ("Copy question", "which one")):
            page.get_by_role("button", name=name).click()
            page.wait_for_function("text => navigator.clipboard.readText().then((found) => found === text)", arg=copied)
            page.wait_for_function("window.shown.splice(0).includes('Copied')")
        assert page.complaints == []


def test_a_conversation_survives_loading_the_page_again(page: "Page", engine: FakeEngine) -> None:
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Temperature").blur()
    hold(page, engine, ("first", "**one**"), ("second", "two"))
    shown = page.locator("#chat").inner_html()
    page.reload()
    ended(page, 2)
    assert page.locator("#chat").inner_html() == shown
    assert page.get_by_label("Temperature").input_value() == "0.5"
    say(engine, "three")
    ask(page, "third")
    ended(page, 3)
    assert (
        prompts(engine)[2] == "user: first\nassistant: **one**\nuser: second\nassistant: two\nuser: third\nassistant:"
    )


def test_an_answer_that_was_left_is_kept_as_far_as_it_came(page: "Page", engine: FakeEngine) -> None:
    engine.script = lambda _: RAW.encode("one two three four five six " * 200).ids
    engine.step_seconds = 0.02
    ask(page, "count")
    page.locator(".answer", has_text="three").wait_for()
    page.reload()
    ended(page, 1)
    assert measures(page).endswith("left while it was answering")
    assert answers(page)[0].startswith("one two three")


def test_conversations_are_listed_opened_and_deleted(page: "Page", engine: FakeEngine) -> None:
    assert page.get_by_text("They are kept in this browser only.").is_visible()
    hold(page, engine, ("first", "one"))
    page.get_by_role("button", name="New chat").click()
    hold(page, engine, ("second", "two"))
    assert titles(page) == ["second", "first"]
    page.get_by_role("button", name="first", exact=True).click()
    assert (questions(page), answers(page)) == (["first"], ["one"])
    say(engine, "three")
    ask(page, "third")
    ended(page, 2)
    assert titles(page) == ["first", "second"], "newest first"
    page.get_by_role("button", name="Delete second").click()
    assert titles(page) == ["first"]
    assert answers(page) == ["one", "three"]
    page.get_by_role("button", name="Delete first").click()
    assert (titles(page), answers(page)) == ([], [])
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('tandem.chat.'))") == []
    page.reload()
    assert page.get_by_role("button", name="How do I join two paths?").is_visible()


def test_a_conversation_deleted_while_it_is_answered_is_not_kept(page: "Page", engine: FakeEngine) -> None:
    engine.script = lambda _: RAW.encode("one two three four five six " * 200).ids
    engine.step_seconds = 0.02
    ask(page, "first")
    page.locator(".answer", has_text="three").wait_for()
    page.get_by_role("button", name="Delete first").click()
    until(lambda: engine.num_running == 0, "the answer is stopped")
    page.locator("#send:enabled").wait_for()
    assert titles(page) == []
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('tandem.chat.'))") == []


def test_what_the_browser_keeps_is_bounded(modules: "Page") -> None:
    kept = modules.evaluate(
        """async () => {
            const storage = await import("/page/storage.js");
            const text = "x".repeat(storage.MAX_CHARACTERS / 8);
            const messages = [{ role: "user", content: text }];
            const kept = (at) => ({ id: `c${at}`, title: `${at}`, updated: at, messages: [] });
            const made = [...Array(60).keys()].map(kept);
            const all = made.map((chat) => storage.keep(chat)).every(Boolean);
            const count = storage.chats().length;
            const large = made.slice(0, 9).map((chat, at) => storage.keep({ ...chat, updated: 100 + at, messages }));
            const size = JSON.stringify(storage.chats()).length;
            const titles = storage.chats().map((chat) => chat.title);
            messages[0].content = "x".repeat(storage.MAX_CHARACTERS);
            return [all, count, large.every(Boolean), size <= storage.MAX_CHARACTERS, titles.slice(0, 3),
                storage.keep({ ...made[0], id: "huge", messages })];
        }"""
    )
    assert kept == [True, 50, True, True, ["8", "7", "6"], False]


def test_broken_entries_of_the_store_are_passed_over(page: "Page") -> None:
    texts = ["no JSON", "null", "[]", '{"id": "a"}', '{"id": "a", "messages": [{"role": "x"}]}']
    page.evaluate(
        """texts => {
            texts.forEach((text, at) => { localStorage[`tandem.chat.${at}`] = text; });
            localStorage["tandem.settings"] = sessionStorage["tandem.current"] = "0";
        }""",
        texts,
    )
    page.reload()
    page.locator("#status", has_text="fake-model").wait_for()
    assert titles(page) == []
    assert page.locator("#examples").is_visible()


def test_an_example_question_is_asked_by_a_click(page: "Page", engine: FakeEngine) -> None:
    say(engine, "os.path.join")
    page.get_by_role("button", name="How do I join two paths?").click()
    ended(page, 1)
    assert prompts(engine) == ["user: How do I join two paths?\nassistant:"]
    assert page.locator("#examples").is_hidden()
    page.get_by_role("button", name="New chat").click()
    assert page.locator("#examples button").count() == 3
    assert page.locator("#examples").is_visible()


def visible_height(box: Any, page: "Page") -> float:
    """Return how much of an element is on the screen."""
    place = box.bounding_box()
    return min(place["y"] + place["height"], page.viewport_size["height"]) - max(place["y"], 0)  # type: ignore[index]


def width(page: "Page") -> int:
    """Return how wide the document is, in CSS pixels."""
    found: int = page.evaluate("document.documentElement.scrollWidth")
    return found


def test_the_parameters_do_not_cover_the_transcript_on_a_phone(
    browser: "Browser", server: RunningServer, engine: FakeEngine
) -> None:
    with browser.new_context(viewport=PHONE, has_touch=True, is_mobile=True) as context:  # type: ignore[arg-type]
        page = open_page(context, server.url)
        page.locator("#status", has_text="fake-model").wait_for()
        transcript, panel = page.locator("#transcript"), page.locator("#settings")
        assert panel.is_hidden()
        assert not page.locator(".hint").is_visible(), "there is no such key"
        toggle = page.get_by_role("button", name="Parameters")
        toggle.click()
        assert (toggle.get_attribute("aria-expanded"), panel.is_visible()) == ("true", True)
        assert panel.bounding_box()["y"] + panel.bounding_box()["height"] <= transcript.bounding_box()["y"] + 1
        assert visible_height(transcript, page) >= 0.15 * PHONE["height"]
        assert visible_height(page.get_by_role("button", name="Send"), page) > 20
        page.get_by_role("button", name="History").click()
        assert panel.is_hidden(), "one panel at a time"
        toggle.click()
        page.keyboard.press("Escape")
        assert panel.is_hidden()
        toggle.click()
        hold(page, engine, ("first", "word " * 300 + "`" + "x" * 200 + "`\n\n```\n" + "y" * 300 + "\n```"))
        assert panel.is_hidden(), "sending gives the room back"
        assert visible_height(transcript, page) >= 0.4 * PHONE["height"]
        assert width(page) == PHONE["width"], "nothing is wider than it"
        page.get_by_role("button", name="Edit question").click()
        assert width(page) == PHONE["width"]
        page.get_by_label("Question", exact=True).press("Enter")
        ended(page, 1)
        page.get_by_role("button", name="New chat").click()
        page.get_by_role("button", name="History").click()
        page.locator("#chat_list").get_by_role("button", name="first", exact=True).click()
        assert questions(page) == ["first"]
        assert page.locator("#chats").is_hidden()
        assert page.complaints == []


def test_a_problem_of_the_schema_is_seen_in_the_panel_of_a_phone(
    browser: "Browser", server: RunningServer, engine: FakeEngine
) -> None:
    for size in (PHONE, {"width": 320, "height": 480}):
        with browser.new_context(viewport=size, has_touch=True, is_mobile=True) as context:  # type: ignore[arg-type]
            page = open_page(context, server.url)
            page.get_by_role("button", name="Parameters").click()
            page.get_by_label("JSON schema").fill('{"a": {"' + "name_" * 30 + '" "integer"}}')
            panel, problem = page.locator("#settings"), page.locator("#problem")
            for blurs in (True, False):
                if blurs:
                    page.get_by_label("JSON schema").blur()
                else:
                    ask(page, "first")
                problem.wait_for()
                outer, inner = panel.bounding_box(), problem.bounding_box()
                assert outer is not None and inner is not None
                assert outer["y"] <= inner["y"], size
                assert inner["y"] + inner["height"] <= outer["y"] + outer["height"], size
                assert width(page) == size["width"]
                # As far from it as the panel allows.
                panel.evaluate("one => { one.scrollTop = 0; }")
            assert engine.submits == []


def test_everything_has_a_name_and_the_keyboard_reaches_it(page: "Page", engine: FakeEngine) -> None:
    hold(page, engine, ("first", "one\n\n```\ntwo\n```"))
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, [role=log], nav, aside")]
            .filter((one) => !(one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim()))
            .map((one) => one.outerHTML)"""
    )
    assert unnamed == []
    page.get_by_role("button", name="New chat").focus()
    reached = ["clear"]
    while reached[-1] != "model" and len(reached) < 40:
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    order = ["clear", "chats_toggle", "settings_toggle", "chat", "transcript", "copy-code", "prompt", "send", "model"]
    assert [name for name in reached if name in order] == order, reached
