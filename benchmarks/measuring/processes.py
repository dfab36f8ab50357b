"""Child processes of the benchmarks."""

import subprocess


def stop_process(process: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Ask a process to end, and kill it if it has not ended after `seconds`."""
    process.terminate()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
