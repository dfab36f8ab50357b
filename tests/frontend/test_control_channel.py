"""Control channel: messages both ways, ends, and a side that does not read."""

import asyncio
import socket

from tandem.frontend.control_channel import Accept, Beat, Drain, Leaving, frontend_end, supervisor_end


def test_messages_arrive_whole_and_in_order() -> None:
    async def check() -> None:
        ours, theirs = socket.socketpair()
        supervisor, frontend = await supervisor_end(ours), await frontend_end(theirs)
        beat = Beat("serving", (0, 2), 3, 4, 0.5)
        frontend.send(beat)
        frontend.send(Leaving())
        supervisor.send(Accept((1,)))
        supervisor.send(Drain(0.0, 25.0))
        assert [await supervisor.receive(), await supervisor.receive()] == [beat, Leaving()]
        assert [await frontend.receive(), await frontend.receive()] == [Accept((1,)), Drain(0.0, 25.0)]
        frontend.close()
        assert await supervisor.receive() is None
        supervisor.send(Accept(()))
        supervisor.close()

    asyncio.run(check())


def test_a_message_that_is_not_one_ends_the_channel() -> None:
    async def check() -> None:
        for data in (b"{}\n", b"garbage\n", b'{"type":"beat"', b'{"type":"accept","slots":[1]}\n'):
            ours, theirs = socket.socketpair()
            supervisor = await supervisor_end(ours)
            theirs.sendall(data)
            theirs.close()
            assert await supervisor.receive() is None, data
            supervisor.close()

    asyncio.run(check())


def test_a_side_that_does_not_read_clogs_the_channel() -> None:
    async def check() -> None:
        ours, theirs = socket.socketpair()
        frontend = await frontend_end(ours)
        assert not frontend.is_clogged
        for _ in range(20_000):
            frontend.send(Beat("serving"))
        assert frontend.is_clogged
        frontend.close()
        theirs.close()

    asyncio.run(check())
