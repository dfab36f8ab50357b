"""Several processes on one store, and one that is killed within a write."""

import subprocess
import sys
from pathlib import Path

from tandem.frontend.store.sqlite_file import open_store
from tandem.frontend.store.store import StoreLimits
from tests.support.stored import retrieved, stored

WRITER = """
import sys
from pathlib import Path
from tandem.frontend.store.sqlite_file import open_store
from tandem.frontend.store.store import StoreLimits
from tests.support.stored import retrieved, stored
store = open_store(Path(sys.argv[1]), StoreLimits())
for number in range(40):
    name = f"{sys.argv[2]}{number}"
    store.save("me", stored(name, f"{sys.argv[2]}{number - 1}" if number else None))
    assert store.get("me", name, 2**20) == retrieved(name, f"{sys.argv[2]}{number - 1}" if number else None)
"""
KILLED = """
import os, sqlite3, sys
from pathlib import Path
from tandem.frontend.store.sqlite_file import open_store
from tandem.frontend.store.store import StoreLimits
from tests.support.stored import retrieved, stored
store = open_store(Path(sys.argv[1]), StoreLimits())
store.save("me", stored("before"))
# The last statement of a transaction is reached, its COMMIT is not.
store._connection.set_trace_callback(lambda text: os.kill(os.getpid(), 9) if text == "COMMIT" else None)
store.save("me", stored("cut", "before", size=100_000))
"""
ROOT = Path(__file__).parents[3]


def start(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"})


def test_processes_share_one_store(tmp_path: Path) -> None:
    writers = [start(WRITER, str(tmp_path), name) for name in "ab"]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    store = open_store(tmp_path, StoreLimits())
    for name in "ab":
        items = store.conversation("me", f"{name}39", 2**20)
        assert items is not None
        assert [item.id for item in items] == [f"{name}{n}-{side}" for n in range(40) for side in "qa"]
    store.close()


def test_process_killed_within_a_write_leaves_the_store_whole(tmp_path: Path) -> None:
    assert start(KILLED, str(tmp_path)).wait(120) == -9
    store = open_store(tmp_path, StoreLimits())
    assert store.get("me", "before", 2**20) == retrieved("before")
    assert store.get("me", "cut", 2**20) is None
    store.save("me", stored("cut", "before"))
    assert store.get("me", "cut", 2**20) == retrieved("cut", "before")
    store.close()
