"""Settings of all tests.

Hypothesis has no deadline, because a loaded machine must not fail a test. Interrupts are enabled: a test run started in
a shell's background ignores them, and so would its children, but some tests send them. Triton interprets its kernels
where there is no GPU: it decides that when a module with kernels is first imported, by whichever test.

The garbage collector rests while tests are collected, and from then on passes over what that made: millions of objects
of libraries and tests that live to the end.

Every test begins with the same random numbers in every run, whichever tests its process has run before, and Hypothesis
tries the same examples. Longer tests (`tests.support.effort`) try others each time.

Torch computes in one thread. Tensors here are small, and if the test processes have more threads than the machine has
cores, those threads take most of the time to wait for each other. Engines of tests may set another number, which the
next test undoes.

Python leaves modules compiled even if its environment forbids it: each process of a server, and each worker of
pytest-xdist, would compile all of them again.
"""

import gc
import os
import random
import signal
import sys
from collections.abc import Generator
from importlib.util import find_spec
from zlib import crc32

import pytest
import torch
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from tests.support.effort import EFFORT
from tests.support.file_scheduling import FilesByKind
from tests.support.first_imports import import_from_own_place

if not torch.cuda.is_available() and find_spec("triton") is not None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

torch.set_num_threads(1)

settings.register_profile(
    "tandem",
    deadline=None,
    print_blob=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=EFFORT == 1,
)
settings.load_profile("tandem")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    gc.disable()
    try:
        import_from_own_place(session.config)
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesByKind | None:
    return FilesByKind(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.set_num_threads(1)
    if EFFORT == 1:
        seed = crc32(item.nodeid.encode())
        random.seed(seed)
        torch.manual_seed(seed)
