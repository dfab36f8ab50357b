"""The process that checks and reads a checkpoint before a swap, as the engine sees it."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from msgspec import Struct

from tandem.engine_core.errors import ConfigError
from tandem.engine_core.loader.checkpoint import Checkpoint
from tandem.engine_core.startup.checkpoint_copy import CheckpointCopy
from tandem.engine_core.startup.file_stamps import Stamp, folder_stamp
from tandem.engine_core.startup.opened_files import read_files
from tandem.engine_core.startup.served_model import ServedModel

PROGRAM = "tandem.engine_core.startup.stage_checkpoint"


class StagerRun(Struct):
    """One run of the program, which a thread follows. A run that was cancelled may end after the next one began."""

    process: subprocess.Popen[bytes] | None
    links: TemporaryDirectory[str] | None = None
    """Folder for links to the files of the checkpoint, until the end of the process."""
    percent: int = 0
    result: str | None = None


class ProcessStager:
    """Implement `contracts.CheckpointStager` with a child process for each checkpoint.

    The engine cannot be harmed in this way by a broken file, or by one too large for memory.
    """

    def __init__(
        self, served: ServedModel, wake: Callable[[], None], *, keeps_copy: bool = False, parent: Path | None = None
    ) -> None:
        """Start nothing.

        served: the engine's model; wake: called at the end of each process; keeps_copy: True to copy what is
        staged (--swap-copy); parent: as in `CheckpointCopy.create`.
        """
        self.served = served
        self.wake = wake
        self.keeps_copy = keeps_copy
        self.parent = parent
        self._copy: CheckpointCopy | None = None
        self._run = StagerRun(None)
        self._stamps: dict[str, Stamp] = {}
        self._root = ""

    @property
    def pid(self) -> int | None:
        """Id of the process that runs, or ran last."""
        return None if self._run.process is None else self._run.process.pid

    def start(self, path: str, root: str = "") -> None:
        self.cancel()
        self.release()
        self._stamps = {path: folder_stamp(Path(path))}
        self._root = root
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        links: TemporaryDirectory[str] | None = None
        try:
            inherited: tuple[int, ...] = ()
            links = TemporaryDirectory(prefix="staged-", dir=self.parent)
            command = [sys.executable, "-m", PROGRAM, path, root, links.name]
            if self.keeps_copy:
                self._copy = CheckpointCopy.create(Path(path), self.parent)
                command, inherited = [*command, str(self._copy.path)], self._copy.descriptors
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, pass_fds=inherited
            )
        except OSError as error:
            self.release()
            if links is not None:
                links.cleanup()
            self._run = StagerRun(None, result=f"the process that stages checkpoints could not be started: {error}")
            return
        self._run = StagerRun(process, links)
        Thread(target=self._follow, args=(self._run, process), name="stager", daemon=True).start()

    def cancel(self) -> None:
        if self._run.process is not None and self._run.process.poll() is None:
            self._run.process.kill()

    def progress(self) -> int:
        return self._run.percent

    def result(self) -> str | None:
        return self._run.result

    def release(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def staged_folder(self, path: str) -> Path:
        """Return the folder to load a staged checkpoint from: its own, or that of the copy.

        Raises ConfigError if its files have changed since it was staged, or are not below the root by now, unless there
        is a copy.
        """
        if self._copy is not None:
            return self._copy.path
        stamp = self._stamps.get(path)
        if not stamp or stamp != folder_stamp(Path(path)):
            raise ConfigError(f"the files in {path} have changed since they were staged; stage them again")
        base = Path(self._root).resolve()
        if self._root and not all(file.resolve().is_relative_to(base) for file in read_files(Path(path))):
            raise ConfigError(f"the files in {path} are not all below {base} (--swap-root)")
        return Path(path)

    def stamp_of(self, checkpoint: Checkpoint, path: str) -> Stamp:
        """Return the stamp that the files of a staged checkpoint had. checkpoint: that of `staged_folder`."""
        names = {tensor.path.name for tensor in checkpoint.tensors.values()}
        return tuple([entry for entry in self._stamps[path] if entry[0] in names])

    def _follow(self, run: StagerRun, process: subprocess.Popen[bytes]) -> None:
        reason = ""
        assert process.stdin is not None and process.stdout is not None
        with process:
            with suppress(BrokenPipeError), process.stdin:
                pickle.dump(self.served, process.stdin)
            for data in process.stdout:
                line = data.decode(errors="replace").strip()
                head, _, rest = line.partition(" ")
                if head == "percent":
                    run.percent = int(rest)
                else:
                    reason = line
        if run.links is not None:
            run.links.cleanup()
        code = process.returncode
        run.result = "" if code == 0 else reason or f"the process that staged it ended with code {code}"
        self.wake()
