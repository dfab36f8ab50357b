"""Processes of a lane that compile no grammar."""

import asyncio

from tandem.frontend.grammar.process import Checked, SlowGrammarError


class FakeCompiler:
    """Process that takes the number of seconds in the grammar."""

    def __init__(self, done: list[tuple[float, str]]) -> None:
        self.done = done

    async def ask(self, grammar: str, cpu_seconds: float) -> Checked:
        await asyncio.sleep(min(float(grammar.split()[0]), cpu_seconds))
        self.done.append((asyncio.get_running_loop().time(), grammar))
        return Checked(None)

    async def close(self) -> None:
        pass


class ImpatientCompiler:
    """Process for which every grammar takes too long."""

    async def ask(self, grammar: str, cpu_seconds: float) -> Checked:
        raise SlowGrammarError

    async def close(self) -> None:
        pass
