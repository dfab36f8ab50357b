"""The engine's end of a worker that is a process."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import psutil
import pytest
from msgspec import structs

from tandem.engine_core.constraints.grammars import CompiledGrammar, Grammars
from tandem.engine_core.constraints.local_matcher import LocalMatcher
from tandem.engine_core.constraints.workers import link as link_module
from tandem.engine_core.constraints.workers.channel import ACCEPT, CLOSE, MAX_OPERATIONS, OPEN
from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.remote_matcher import RemoteGrammar, RemoteMatcher
from tandem.engine_core.constraints.workers.settings import WorkerFacts
from tandem.engine_core.errors import RequestError
from tandem.engine_core.integers import ceil_div
from tandem.protocol.errors import ErrorCode
from tests.engine_core.constraints.conftest import ENDS, VOCAB
from tests.support.grammar_walks import WALKED, mask_of
from tests.support.refusals import numbers_in
from tests.support.remote_steps import begin_accept, begin_mask
from tests.support.stopped_process import stop_process

WORDS = ceil_div(VOCAB, 32)
TEXT = WALKED["letters"]


@pytest.fixture(scope="module")
def masks() -> MaskMemory:
    memory = MaskMemory()
    memory.allocate(2, WORDS)
    return memory


@pytest.fixture(scope="module")
def facts(grammars: Grammars) -> WorkerFacts:
    return WorkerFacts(str(grammars.tokenizer_file), VOCAB, ENDS, 4 * WORDS)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may hold up the start of a process, or its answer, for seconds."""
    monkeypatch.setattr(link_module, "ANSWER_SECONDS", 60.0)
    monkeypatch.setattr(link_module, "COMPILE_SECONDS", 120.0)


@pytest.fixture
def link(facts: WorkerFacts, masks: MaskMemory) -> Iterator[WorkerLink]:
    started = WorkerLink.start(facts, masks)
    yield started
    started.close()


@pytest.fixture
def compiled(grammars: Grammars) -> CompiledGrammar:
    return grammars.compile(TEXT)


def compile_on(link: WorkerLink, text: str = TEXT) -> int:
    number = link.compile(text)
    assert number is not None
    return number


def pid(link: WorkerLink) -> int:
    process = link._process
    assert isinstance(process, subprocess.Popen)
    return process.pid


def until(is_true: Callable[[], bool]) -> None:
    while not is_true():
        time.sleep(0.002)


def check_mask(link: WorkerLink, remote: RemoteMatcher, alone: LocalMatcher, masks: MaskMemory) -> None:
    """Compare the mask that the worker writes."""
    mask = masks.arrays[0]
    mask[1] = 0
    begin_mask(remote, masks.first_index(mask) + 1)
    link.post_and_wait()
    assert remote.end_mask()
    assert mask[1].tolist() == mask_of(alone._matcher, WORDS)


def test_a_worker_outlives_failures_and_signals(
    link: WorkerLink, masks: MaskMemory, grammars: Grammars, compiled: CompiledGrammar
) -> None:
    """It refuses what does not compile, and ignores what a terminal or a service sends to all processes."""
    token = grammars.prepare().tokenize_str("b")[0]
    with pytest.raises(RequestError) as first:
        link.compile("start: nowhere")
    remote, alone = RemoteMatcher(RemoteGrammar(link, compile_on(link)), compiled), LocalMatcher(compiled)
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid(link), signal_number)
    with pytest.raises(RequestError) as second:
        link.compile("start: nowhere")
    assert first.value.code is second.value.code is ErrorCode.INVALID_GRAMMAR
    assert remote.consume_token(token) and alone.consume_token(token)
    check_mask(link, remote, alone, masks)
    assert not link.is_lost and remote.local is None


def test_a_worker_reports_masks_that_allow_an_end(
    link: WorkerLink, masks: MaskMemory, grammars: Grammars, compiled: CompiledGrammar
) -> None:
    remote, alone = RemoteMatcher(RemoteGrammar(link, compile_on(link)), compiled), LocalMatcher(compiled)
    check_mask(link, remote, alone, masks)
    assert not link.take_ending()
    token = grammars.prepare().tokenize_str("b")[0]
    assert remote.consume_token(token) and alone.consume_token(token)
    check_mask(link, remote, alone, masks)
    assert link.take_ending()


def test_more_operations_than_a_batch_holds_are_done(link: WorkerLink) -> None:
    number = compile_on(link)
    for slot in (1, 2):
        link.pending.extend((OPEN, slot, number))
    for _ in range(MAX_OPERATIONS):
        link.pending.extend((CLOSE, 2, 0, OPEN, 2, number, ACCEPT, 1, ENDS[0]))
    link.post_and_wait()
    assert link.channel.is_done and not link.pending and not link.is_lost


@pytest.mark.parametrize("is_stopped", [False, True], ids=["killed", "stopped"])
def test_a_worker_that_is_gone_is_replaced_by_this_process(
    link: WorkerLink,
    grammars: Grammars,
    compiled: CompiledGrammar,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_stopped: bool,
) -> None:
    token = grammars.prepare().tokenize_str("b")[0]
    grammar = RemoteGrammar(link, compile_on(link))
    remote, alone = RemoteMatcher(grammar, compiled), LocalMatcher(compiled)
    link.post_and_wait()
    if is_stopped:
        monkeypatch.setattr(link_module, "ANSWER_SECONDS", 0.05)
        stop_process(pid(link))
    else:
        os.kill(pid(link), signal.SIGKILL)
    for _ in range(3):
        assert remote.consume_token(token) and alone.consume_token(token)
        assert remote.is_stopped() == alone.is_stopped()
    assert link.is_lost and remote.local is not None and grammar.is_spent
    assert not link.has_room and link.compile(TEXT) is None
    assert not psutil.pid_exists(pid(link))
    reason = "did not answer within 0.05 s" if is_stopped else "ended with code -9"
    assert [reason in message for message in caplog.messages] == [True]
    link.post_and_wait()
    assert not link.pending


def test_a_worker_that_does_not_compile_in_time_is_asked_no_more(
    link: WorkerLink, compiled: CompiledGrammar, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its late answer would be taken for that to the next grammar. What it follows, it goes on to follow."""
    remote = RemoteMatcher(RemoteGrammar(link, compile_on(link)), compiled)
    monkeypatch.setattr(link_module, "COMPILE_SECONDS", 0.02)
    stop_process(pid(link))
    assert link.compile(TEXT) is None and not link.has_room
    os.kill(pid(link), signal.SIGCONT)
    assert link.compile(TEXT) is None
    link.post_and_wait()
    assert not link.is_lost and not remote.is_stopped() and remote.local is None
    assert ["0.02 s" in message for message in caplog.messages] == [True]


def test_an_idle_worker_that_has_ended_is_found_by_the_next_grammar(link: WorkerLink) -> None:
    os.kill(pid(link), signal.SIGKILL)
    assert link.compile(TEXT) is None
    assert not link.has_room
    link.post()
    assert not link.is_lost, "the loop has not needed it"


def test_a_worker_that_fails_is_lost(link: WorkerLink, caplog: pytest.LogCaptureFixture) -> None:
    link.pending.extend((ACCEPT, 7, 1))
    link.post_and_wait()
    assert link.is_lost
    assert [1 in numbers_in(message) for message in caplog.messages] == [True]


def test_closing_ends_a_compilation_that_waits(link: WorkerLink) -> None:
    """The thread that waits for the answer is told; closing again changes nothing."""
    compile_on(link)
    stop_process(pid(link))
    answers: list[int | None] = []
    thread = Thread(target=lambda: answers.append(link.compile(TEXT)))
    thread.start()
    until(link._compiling.locked)
    link.close()
    thread.join()
    link.close()
    assert answers == [None] and link.is_lost


def descriptors() -> set[str]:
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def test_descriptors_and_processes_do_not_stay(facts: WorkerFacts, masks: MaskMemory) -> None:
    before = descriptors()
    children = {child.pid for child in psutil.Process().children()}
    for _ in range(2):
        started = WorkerLink.start(facts, masks)
        started.close()
        del started
    assert descriptors() <= before
    assert {child.pid for child in psutil.Process().children()} <= children


def test_descriptors_do_not_stay_where_a_start_fails(
    facts: WorkerFacts, masks: MaskMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(FileNotFoundError):
        WorkerLink.start(facts, masks)
    assert descriptors() <= before


def test_a_worker_without_a_tokenizer_reports_it(facts: WorkerFacts, masks: MaskMemory) -> None:
    started = WorkerLink.start(structs.replace(facts, tokenizer_file="/nowhere/tokenizer.json"), masks)
    with pytest.raises(RequestError, match=r"\btokenizer\.json"):
        started.compile(TEXT)
    started.close()


def test_modules_of_the_working_directory_are_not_those_of_a_worker(
    facts: WorkerFacts, masks: MaskMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("msgspec", "random", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('from the working directory')")
    monkeypatch.chdir(tmp_path)
    started = WorkerLink.start(facts, masks)
    assert started.compile(TEXT) == 1
    started.close()


ENGINE = """
import os, signal, sys
from pathlib import Path
from tandem.engine_core.constraints.workers.link import WorkerLink
from tandem.engine_core.constraints.workers.mask_memory import MaskMemory
from tandem.engine_core.constraints.workers.settings import WorkerFacts

memory = MaskMemory()
memory.allocate(1, {words})
link = WorkerLink.start(WorkerFacts({file!r}, {vocab}, {ends}, 4 * {words}), memory)
link.compile({text!r})
print(link._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worker_ends_with_its_engine(grammars: Grammars) -> None:
    """Also with one that is killed. Its standard output, which it shares with the worker, then ends too."""
    code = ENGINE.format(words=WORDS, file=str(grammars.tokenizer_file), vocab=VOCAB, ends=ENDS, text=TEXT)
    engine = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, check=False)
    assert engine.returncode == -signal.SIGKILL
    worker = int(engine.stdout)
    until(lambda: not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE)


def test_batches_keep_their_order_across_sleeps(link: WorkerLink, grammars: Grammars, masks: MaskMemory) -> None:
    """The worker lies down between some of them."""
    compiled = grammars.compile(WALKED["words"])
    number = RemoteGrammar(link, compile_on(link, WALKED["words"]))
    remote, alone = RemoteMatcher(number, compiled), LocalMatcher(compiled)
    tokens = array("i", grammars.prepare().tokenize_str("some words and others"))
    for index, token in enumerate(tokens):
        begin_accept(remote, token)
        link.post()
        assert alone.consume_token(token)
        time.sleep((0.0, 0.007, 0.06)[index % 3])
        link.wait_accepted()
        assert remote.end_accept()[0]
        check_mask(link, remote, alone, masks)
